// What a decode step does beside its matrix products and its all-reduces, for experiments/decode: small kernels that move the
// bytes which a serving engine's would move. No part of a collective: source_hash() does not cover this file, and a decode run
// records its hash for itself.
//
// Elements are 16 bits wide, DECODE_T (fc::BF16 or fc::F16); sums are float32, in an order that the launch shape fixes, so that
// one step has the same bits each time. All rows are multiples of 16 bytes and begin at such.
#define FC_N 1
#include "reduce.cuh"

namespace decode {

using fc::Cell;
using fc::u32;
using fc::u64;
typedef DECODE_T T;
constexpr int kPerCell = 8;  // elements of 16 bytes
constexpr u32 kWarp = 32;

FC_DEVICE void unpack(Cell c, float* f) {
#pragma unroll
  for (int j = 0; j < kPerCell; j++) f[j] = T::get(c.w[j / 2], j % 2);
}
FC_DEVICE Cell pack(const float* f) {
  Cell c;
#pragma unroll
  for (int j = 0; j < kPerCell / 2; j++) c.w[j] = T::put(f + 2 * j);
  return c;
}
FC_DEVICE const Cell* cells(u64 address) { return reinterpret_cast<const Cell*>(address); }
FC_DEVICE Cell* cells_out(u64 address) { return reinterpret_cast<Cell*>(address); }

// A public-domain hash of 32 bits (C. Wellons's lowbias32): the same in NumPy, so that both backends have the same weights.
FC_DEVICE u32 mixed(u32 x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

}  // namespace decode

using namespace decode;

// Pseudo-random elements, uniform in centre +- scale: element i has hash(i) of that seed. words: pairs of elements.
extern "C" __global__ void fill(u64 out, u64 words, u32 seed, float centre, float scale) {
  for (u64 w = blockIdx.x * u64(blockDim.x) + threadIdx.x; w < words; w += u64(gridDim.x) * blockDim.x) {
    float pair[2];
    for (u32 k = 0; k < 2; k++) {
      const u64 i = 2 * w + k;
      const u32 h = mixed(u32(i) ^ mixed(u32(i >> 32) ^ mixed(seed)));
      pair[k] = centre + (float(h >> 8) * 0x1p-23f - 1.0f) * scale;
    }
    reinterpret_cast<u32*>(out)[w] = T::put(pair);
  }
}

// x += r (unless r is 0), rounded; out = x / sqrt(mean(x^2) + eps) * gain. One block a row of `hidden` elements.
extern "C" __global__ void __launch_bounds__(1024) add_rms_norm(u64 x, u64 r, u64 gain, u64 out, u32 hidden, float eps) {
  __shared__ float of_warp[kWarp];
  const u32 row_cells = hidden / kPerCell;
  const u64 row = blockIdx.x * u64(row_cells);
  float squares = 0;
  for (u32 c = threadIdx.x; c < row_cells; c += blockDim.x) {
    float v[kPerCell];
    unpack(cells(x)[row + c], v);
    if (r) {
      float more[kPerCell];
      unpack(cells(r)[row + c], more);
      for (int j = 0; j < kPerCell; j++) v[j] += more[j];
      const Cell rounded = pack(v);
      cells_out(x)[row + c] = rounded;
      unpack(rounded, v);
    }
    for (int j = 0; j < kPerCell; j++) squares = fmaf(v[j], v[j], squares);
  }
  for (u32 step = kWarp / 2; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = squares;
  __syncthreads();
  float total = 0;
  for (u32 w = 0; w < blockDim.x / kWarp; w++) total += of_warp[w];
  const float factor = 1.0f / sqrtf(total / float(hidden) + eps);
  for (u32 c = threadIdx.x; c < row_cells; c += blockDim.x) {  // a thread reads back what it has itself stored
    float v[kPerCell], g[kPerCell];
    unpack(cells(x)[row + c], v);
    unpack(cells(gain)[c], g);
    for (int j = 0; j < kPerCell; j++) v[j] = v[j] * factor * g[j];
    cells_out(out)[row + c] = pack(v);
  }
}

// out = silu(gate) * up; a row of gate_up is the gates, then the ups, `width` elements each.
extern "C" __global__ void silu_mul(u64 gate_up, u64 out, u32 rows, u32 width) {
  const u32 row_cells = width / kPerCell, count = rows * row_cells;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const u64 at = u64(i / row_cells) * 2 * row_cells + i % row_cells;
    float gate[kPerCell], up[kPerCell];
    unpack(cells(gate_up)[at], gate);
    unpack(cells(gate_up)[at + row_cells], up);
    for (int j = 0; j < kPerCell; j++) gate[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    cells_out(out)[i] = pack(gate);
  }
}

namespace decode {

constexpr u32 kDim = DECODE_HEAD_DIM;      // of a head
constexpr u32 kGroup = DECODE_GROUP;       // query heads that share a key and value head
constexpr u32 kLanes = kDim / kPerCell;    // that read one position together, 16 bytes each
constexpr u32 kThreads = 128;              // of a block
constexpr u32 kTeams = kThreads / kLanes;  // positions that a block reads at a time
constexpr float kLowest = -3e38f;          // below every score
static_assert(kDim % kPerCell == 0 && kLanes <= kWarp && (kLanes & (kLanes - 1)) == 0, "a head is 8 to 256 elements");

// What a part of the positions adds up to: the largest score, the sum of exp(score - largest), the values so weighted.
struct Part {
  float largest, weight, value[kDim];
};

}  // namespace decode

// One query against a cache: softmax(q k / sqrt(dim)) v for the query heads of one key and value head, over one part of the
// context, read once each. grid: (parts, key and value heads, sequences). A row of qkv is the query heads, then the new
// token's keys, then its values; the new token stands behind the cached ones. keys, values: (sequence, head, position, dim).
// No rotary embedding, no paging, and the new token's key and value are not written to the cache.
extern "C" __global__ void __launch_bounds__(kThreads) attend(u64 qkv, u64 keys, u64 values, u64 parts, u32 context,
                                                              float scale) {
  __shared__ Part team_parts[kTeams];
  const u32 part = blockIdx.x, head = blockIdx.y, heads = gridDim.y, sequence = blockIdx.z;
  const u32 lane = threadIdx.x % kLanes, team = threadIdx.x / kLanes;
  const u64 row = u64(sequence) * heads * (kGroup + 2) * kLanes;  // in cells, as all that follows
  const u64 new_key = row + u64(heads) * kGroup * kLanes + head * kLanes, new_value = new_key + heads * kLanes;
  const u64 cache = (u64(sequence) * heads + head) * context * kLanes;
  const u32 length = context + 1, share = (length + gridDim.x - 1) / gridDim.x;
  const u32 first = part * share, last = first + share < length ? first + share : length;

  float q[kGroup][kPerCell], sum[kGroup][kPerCell], largest[kGroup], weight[kGroup];
#pragma unroll
  for (u32 g = 0; g < kGroup; g++) {
    unpack(cells(qkv)[row + (head * kGroup + g) * kLanes + lane], q[g]);
    largest[g] = kLowest, weight[g] = 0;
    for (int j = 0; j < kPerCell; j++) sum[g][j] = 0;
  }
  for (u32 base = first; base < last; base += kTeams) {  // all teams go round as often: lanes of several are one warp
    const u32 at = base + team;
    const bool there = at < last, cached = at < context;
    float k[kPerCell] = {}, v[kPerCell] = {};
    if (there) {
      unpack(cached ? cells(keys)[cache + u64(at) * kLanes + lane] : cells(qkv)[new_key + lane], k);
      unpack(cached ? cells(values)[cache + u64(at) * kLanes + lane] : cells(qkv)[new_value + lane], v);
    }
#pragma unroll
    for (u32 g = 0; g < kGroup; g++) {
      float score = 0;
      for (int j = 0; j < kPerCell; j++) score = fmaf(q[g][j], k[j], score);
#pragma unroll
      for (u32 step = kLanes / 2; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
      if (!there) continue;  // behind the exchange, in which all lanes take part
      score *= scale;
      const float more = fmaxf(largest[g], score), shrink = expf(largest[g] - more), p = expf(score - more);
      largest[g] = more;
      weight[g] = weight[g] * shrink + p;
      for (int j = 0; j < kPerCell; j++) sum[g][j] = fmaf(p, v[j], sum[g][j] * shrink);
    }
  }
#pragma unroll
  for (u32 g = 0; g < kGroup; g++) {  // one query head after the other, through the same shared memory
    __syncthreads();
    Part& mine = team_parts[team];
    for (int j = 0; j < kPerCell; j++) mine.value[lane * kPerCell + j] = sum[g][j];
    if (lane == 0) mine.largest = largest[g], mine.weight = weight[g];
    __syncthreads();
    Part& whole = reinterpret_cast<Part*>(parts)[((u64(sequence) * heads + head) * kGroup + g) * gridDim.x + part];
    float of_all = kLowest;
    for (u32 t = 0; t < kTeams; t++) of_all = fmaxf(of_all, team_parts[t].largest);
    for (u32 d = threadIdx.x; d < kDim; d += kThreads) {
      float value = 0;
      for (u32 t = 0; t < kTeams; t++) value += team_parts[t].value[d] * expf(team_parts[t].largest - of_all);
      whole.value[d] = value;
    }
    if (threadIdx.x == 0) {
      float total = 0;
      for (u32 t = 0; t < kTeams; t++) total += team_parts[t].weight * expf(team_parts[t].largest - of_all);
      whole.largest = of_all, whole.weight = total;
    }
  }
}

// Adds the parts of one query head up, in their order. grid: (query heads, sequences), a thread for each pair of elements.
extern "C" __global__ void combine(u64 parts, u64 out, u32 count) {
  const u64 head = blockIdx.y * u64(gridDim.x) + blockIdx.x;
  const Part* of_it = reinterpret_cast<const Part*>(parts) + head * count;
  float largest = kLowest, weight = 0, value[2] = {};
  for (u32 p = 0; p < count; p++) largest = fmaxf(largest, of_it[p].largest);
  for (u32 p = 0; p < count; p++) {
    const float factor = expf(of_it[p].largest - largest);
    weight += of_it[p].weight * factor;
    for (u32 j = 0; j < 2; j++) value[j] += of_it[p].value[2 * threadIdx.x + j] * factor;
  }
  for (u32 j = 0; j < 2; j++) value[j] /= weight;
  reinterpret_cast<u32*>(out)[head * (kDim / 2) + threadIdx.x] = T::put(value);
}
