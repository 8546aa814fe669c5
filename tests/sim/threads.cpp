// All ranks of the cpu backend as threads of one process: what ThreadSanitizer can look at. The kernel is compiled in front
// of this text. Reads a job, runs each rank's launches in order, and compares the outputs.
#include <stdio.h>
#include <stdlib.h>

#include <thread>
#include <vector>

typedef unsigned long long word;
struct Header {
  word ranks, launches, slab_bytes, array_bytes, params_bytes;
};
struct Row {  // kernel 0: a step
  word rank, kernel, blocks, threads, out_at, out_bytes, fill_at, fill_bytes;
};

static std::vector<unsigned char> read_file(const char* path) {
  FILE* f = fopen(path, "rb");
  if (!f) exit(3);
  std::vector<unsigned char> all;
  unsigned char buffer[1 << 16];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;) all.insert(all.end(), buffer, buffer + n);
  fclose(f);
  return all;
}

int main(int, char** argv) {
  const std::vector<unsigned char> job = read_file(argv[1]);
  const unsigned char* at = job.data();
  Header h;
  memcpy(&h, at, sizeof h);
  at += sizeof h;
  std::vector<unsigned char*> slab, arrays;
  for (word r = 0; r < h.ranks; r++) {
    slab.push_back(static_cast<unsigned char*>(aligned_alloc(128, (h.slab_bytes + 127) / 128 * 128)));
    memcpy(slab.back(), at, h.slab_bytes);
    at += h.slab_bytes;
    arrays.push_back(static_cast<unsigned char*>(aligned_alloc(256, h.array_bytes)));
    memset(arrays.back(), 0xa5, h.array_bytes);
  }
  // A simulated address (fcomm/backends/sim.py) as one of this process.
  const auto real = [&](word a) -> word {
    const word rank = (a >> 33) - 1;
    if (a >> 33 == 0 || rank >= h.ranks) return a;
    return reinterpret_cast<word>(a >> 32 & 1 ? arrays[rank] : slab[rank]) + (a & 0xffffffffu);
  };
  std::vector<std::vector<const unsigned char*>> launches(h.ranks);
  for (word i = 0; i < h.launches; i++) {
    Row row;
    memcpy(&row, at, sizeof row);
    launches[row.rank].push_back(at);
    at += sizeof row + (row.kernel ? h.params_bytes : row.out_bytes + row.fill_bytes);
  }
  int wrong = 0;
  const auto run = [&](word rank) {
    for (const unsigned char* place : launches[rank]) {
      Row row;
      memcpy(&row, place, sizeof row);
      place += sizeof row;
      if (row.kernel) {
        fc::Params p;
        memcpy(&p, place, sizeof p);
        for (word* w : {&p.control, &p.in, &p.out}) *w = real(*w);
        for (word& w : p.slab) w = real(w);
        fc_launch(&p, unsigned(row.blocks), unsigned(row.threads));
        continue;
      }
      if (memcmp(reinterpret_cast<void*>(real(row.out_at)), place, row.out_bytes) != 0) {
        __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
      }
      memcpy(reinterpret_cast<void*>(real(row.fill_at)), place + row.out_bytes, row.fill_bytes);
    }
  };
  std::vector<std::thread> ranks;
  for (word r = 0; r < h.ranks; r++) ranks.emplace_back(run, r);
  for (auto& t : ranks) t.join();
  printf("%d wrong outputs\n", wrong);
  return wrong ? 4 : 0;
}
