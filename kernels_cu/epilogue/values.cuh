// Epilogues: what a small device function does with the reduced values while they are still in registers.
//
// An epilogue is a struct with kByRow, kReads, kColumns and a function template apply(values), which fcomm/epilogue.py writes
// around a caller's lines. It sees reduced values as all-reduce would have stored them, rounded to the element type, and so
// does each step of it what it returns: the bits are those of separate kernels that hand arrays to each other.
#pragma once
#include "epilogue/f32.cuh"
#include "reduce.cuh"

namespace fc {

typedef decltype(Params::out) Address;  // of an array of the caller's

// An element type whose results go through the epilogue E on their way to memory: any kernel that stores sums of it has one.
template <class T, class E>
struct Then : T {};

// Values that one thread holds: up to kCells cells of a stretch of the message, `step` bytes apart. The stretch begins
// `from` bytes into the launch's message and has `nbytes`; row vectors begin where it does, so it is a row for those. `turn`
// counts the block's sums, from row to row: see block_tree_sum().
template <class G, class T, class E, u32 kCells>
class Values {
 public:
  FC_DEVICE Values(const Params& p, u64 from, u64 nbytes, Span first, u32 step, u32& turn)
      : p_(p), from_(from), nbytes_(nbytes), first_(first), step_(step), turn_(turn) {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) v_[k] = Payload{{0, 0, 0, 0}};
  }

  // ---- for epilogues ----
  // Replaces each value by f(value, index of the element in the message).
  template <class F>
  FC_DEVICE void map(const F& f) {
    each([&](u32 k, int i, int e, f32 v) { return f(v, index(k) + u64(i * kPerWord + e)); });
  }
  // Replaces each value by f(value, the array's element at its place, in its column for a row vector).
  template <class F>
  FC_DEVICE void with(int array, const F& f) {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      if (!kHeld && here(k)) held_[0][k] = read(array, k);
    }
    const int at = kHeld ? array : 0;
    each([&](u32 k, int i, int e, f32 v) { return f(v, f32(T::get(held_[at][k].w[i], e))); });
  }
  // Writes the values to an array.
  FC_DEVICE void store(int array) const { store_to(p_.epilogue.array[array]); }
  // Sum of f(value) over the row: float32, in the binary tree over the columns, whatever grid or encoding there is. All threads of
  // the block call it.
  template <class F>
  FC_DEVICE f32 sum(const F& f) {
    static_assert(E::kByRow, "sums are over whole rows: declare the epilogue with by_row=True");
    float leaf[kCells];
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      float term[kElements];
#pragma unroll
      for (int i = 0; i < kElements; i++) {
        term[i] = here(k) ? canonical(f(f32(T::get(v_[k].w[i / kPerWord], i % kPerWord)))) : 0.0f;
      }
#pragma unroll
      for (int m = 1; m < kElements; m *= 2) {
#pragma unroll
        for (int i = 0; i < kElements; i += 2 * m) term[i] = add_rn(term[i], term[i + m]);
      }
      leaf[k] = term[0];
    }
    return block_tree_sum<kCells>(p_, leaf, turn_++);
  }
  FC_DEVICE u32 columns() const { return p_.epilogue.columns; }
  FC_DEVICE f32 scalar(int i) const { return p_.epilogue.scalar[i]; }

  // ---- for kernels ----
  FC_DEVICE bool here(u32 k) const { return kCells == 1 && step_ == 0 ? true : span(k).offset < nbytes_; }
  FC_DEVICE Span span(u32 k) const { return Span{first_.offset + k * step_, first_.bytes}; }
  FC_DEVICE void set(u32 k, Payload v) { v_[k] = v; }
  FC_DEVICE Payload get(u32 k) const { return v_[k]; }
  FC_DEVICE void store_to(Address message) const {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      if (here(k)) store_payload<G, T>(p_, message + from_, nbytes_, span(k), v_[k]);
    }
  }
  // Asks for arrays that the epilogue reads, if there are registers for all of it: for the message's likes while the values are
  // on their way, for row vectors when the peers' cells have been added and need none any more.
  FC_DEVICE void prefetch_reads() { prefetch(0, E::kReads); }
  FC_DEVICE void prefetch_row_vectors() { prefetch(E::kReads, kArrays); }

 private:
  static constexpr int kPerWord = 4 / T::kElement, kElements = G::kWords * kPerWord;
  static constexpr int kArrays = E::kReads + E::kColumns;
  static constexpr bool kHeld = kArrays > 0 && kArrays* kCells <= 4;  // 16 registers

  FC_DEVICE u64 index(u32 k) const { return p_.epilogue.first + (from_ + span(k).offset) / T::kElement; }
  FC_DEVICE Payload read(int array, u32 k) const {
    const bool row_vector = array >= E::kReads;
    return load_payload<G, T>(p_, p_.epilogue.array[array] + (row_vector ? 0ull : from_), nbytes_, span(k));
  }
  FC_DEVICE void prefetch(int begin, int end) {
    if constexpr (kHeld) {
#pragma unroll
      for (int a = 0; a < kArrays; a++) {
#pragma unroll
        for (u32 k = 0; k < kCells; k++) {
          if (a >= begin && a < end && here(k)) held_[a][k] = read(a, k);
        }
      }
    }
  }
  // The contract's NaN, of a caller's arithmetic too: a host would keep payloads that a GPU does not.
  static FC_DEVICE float canonical(f32 x) { return x.v != x.v ? bits_to_float(0x7fffffffu) : x.v; }
  template <class F>
  FC_DEVICE void each(const F& f) {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
#pragma unroll
      for (int i = 0; i < G::kWords; i++) {
        float changed[kPerWord];
#pragma unroll
        for (int e = 0; e < kPerWord; e++) changed[e] = canonical(f(k, i, e, f32(T::get(v_[k].w[i], e))));
        v_[k].w[i] = T::put(changed);
      }
    }
  }

  const Params& p_;
  const u64 from_, nbytes_;
  const Span first_;
  const u32 step_;
  u32& turn_;
  Payload v_[kCells], held_[kHeld ? kArrays : 1][kCells];
};

template <class T, class E>
struct Finish<Then<T, E>> {
  template <class G>
  static FC_DEVICE Payload apply(const Params& p, Address base, u64 nbytes, Span span, Payload v) {
    u32 turn = 0;
    Values<G, T, E, 1> values(p, base - p.out, nbytes, span, 0, turn);
    values.set(0, v);
    values.prefetch_reads();
    E::apply(values);
    return values.get(0);
  }
};

}  // namespace fc
