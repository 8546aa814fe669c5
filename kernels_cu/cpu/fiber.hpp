// One fiber per CUDA thread, all on the calling OS thread: the smallest machine on which a kernel that spins on a peer's
// store makes progress. A fiber gives way only in a wait (a spin, a barrier, a vote), so everything between two waits
// runs like straight code. After each round over the fibers the OS gets a turn, so that more ranks than cores work too.
#pragma once
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "flash-comm's cpu backend knows x86-64 and aarch64 only"
#endif

// Saves the callee-saved registers on the current stack, stores the stack pointer in *from and continues on `to`.
extern "C" __attribute__((visibility("hidden"))) void fc_fiber_switch(void** from, void* to);

#if defined(__x86_64__)
__asm__(
    ".text\n.p2align 4\n.hidden fc_fiber_switch\n.globl fc_fiber_switch\n.type fc_fiber_switch,@function\n"
    "fc_fiber_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size fc_fiber_switch,.-fc_fiber_switch\n");
#else
__asm__(
    ".text\n.p2align 4\n.hidden fc_fiber_switch\n.globl fc_fiber_switch\n.type fc_fiber_switch,%function\n"
    "fc_fiber_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n"
    ".size fc_fiber_switch,.-fc_fiber_switch\n");
#endif

// ThreadSanitizer takes each fiber for a thread, and a gate for what orders them; the bookkeeping of the shim itself, which
// one OS thread does, is no business of its.
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define FC_UNWATCHED             __attribute__((no_sanitize("thread")))
#define FC_FIBER_RELEASE(what)   __tsan_release(what)
#define FC_FIBER_ACQUIRE(what)   __tsan_acquire(what)
#define FC_FIBER_SWITCH(watched) __tsan_switch_to_fiber(watched, __tsan_switch_to_fiber_no_sync)
#define FC_FIBER_CREATE()        __tsan_create_fiber(0)
#define FC_FIBER_DESTROY(w)      __tsan_destroy_fiber(w)
#define FC_FIBER_CURRENT()       __tsan_get_current_fiber()
#else
#define FC_UNWATCHED
#define FC_FIBER_RELEASE(what)   (void)0
#define FC_FIBER_ACQUIRE(what)   (void)0
#define FC_FIBER_SWITCH(watched) (void)0
#define FC_FIBER_CREATE()        nullptr
#define FC_FIBER_DESTROY(w)      (void)0
#define FC_FIBER_CURRENT()       nullptr
#endif

namespace fc_cpu {

constexpr size_t kStackBytes = 32 * 1024;
constexpr unsigned kWarp = 32;

struct Dim3 {
  unsigned x, y, z;
};

// Meeting point of a set of fibers: the last to arrive opens it and starts the next generation.
struct Gate {
  unsigned arrived, generation;
};

struct Warp {
  Gate gate[kWarp];       // one for each possible lowest lane of a mask; masks in use at one time are disjoint
  unsigned votes[kWarp];  // the lanes' predicates
};

struct Block {
  unsigned index, live;  // fibers of this block that have not returned
  Gate gate;
  Warp* warps;
};

struct Fiber {
  void* stack_pointer;
  Block* block;
  unsigned thread;
  bool done;
  void* watched;  // ThreadSanitizer's name of it
};

// The grid that runs on this OS thread.
struct Grid {
  Fiber* fibers;
  unsigned count, current, live;
  unsigned blocks, threads;
  void* main_stack_pointer;
  void* main_watched;
  void (*body)(const void*);
  const void* argument;
};

inline Grid*& grid() {
  static thread_local Grid* running = nullptr;
  return running;
}

FC_UNWATCHED inline Fiber& self() { return grid()->fibers[grid()->current]; }

// Continues with the next fiber that has not returned; to be called by one that waits, or that has just returned.
FC_UNWATCHED inline void next_fiber() {
  Grid* g = grid();
  void** from = &g->fibers[g->current].stack_pointer;
  unsigned i = g->current;
  do {
    if (++i == g->count) {
      i = 0;
      sched_yield();
    }
  } while (g->fibers[i].done);
  if (i == g->current) return;
  g->current = i;
  FC_FIBER_SWITCH(g->fibers[i].watched);
  fc_fiber_switch(from, g->fibers[i].stack_pointer);
}

FC_UNWATCHED inline void wait_at(Gate& gate, unsigned expected) {
  FC_FIBER_RELEASE(&gate);
  const unsigned generation = gate.generation;
  if (++gate.arrived >= expected) {
    gate.arrived = 0;
    gate.generation++;
    FC_FIBER_ACQUIRE(&gate);
    return;
  }
  while (gate.generation == generation) next_fiber();
  FC_FIBER_ACQUIRE(&gate);
}

FC_UNWATCHED inline void fiber_main() {
  Grid* g = grid();
  g->body(g->argument);
  Fiber& me = self();
  Block& block = *me.block;
  me.done = true;
  FC_FIBER_RELEASE(g);
  FC_FIBER_RELEASE(&block.gate);
  g->live--;
  // A thread that has returned no longer counts at its block's barrier (as on sm_70 and later).
  if (--block.live > 0 && block.gate.arrived >= block.live) {
    block.gate.arrived = 0;
    block.gate.generation++;
  }
  if (g->live == 0) {
    void* unused;
    FC_FIBER_SWITCH(g->main_watched);
    fc_fiber_switch(&unused, g->main_stack_pointer);
  }
  next_fiber();
  __builtin_unreachable();
}

// Memory of the fibers' stacks and bookkeeping, kept by the OS thread for the next grid.
struct Arena {
  char* base = nullptr;
  size_t bytes = 0;
  ~Arena() {
    if (base) munmap(base, bytes);
  }
  char* reserve(size_t wanted) {
    if (wanted > bytes) {
      if (base) munmap(base, bytes);
      void* p = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) {
        base = nullptr;
        bytes = 0;
        return nullptr;
      }
      base = static_cast<char*>(p);
      bytes = wanted;
    }
    return base;
  }
};

inline void* first_frame(char* stack_top, void (*entry)()) {
  uintptr_t* sp = reinterpret_cast<uintptr_t*>(stack_top);
#if defined(__x86_64__)
  *--sp = 0;  // the return address of entry(), which never returns; keeps rsp + 8 a multiple of 16 there
  *--sp = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; i++) *--sp = 0;
#else
  sp -= 20;
  for (int i = 0; i < 20; i++) sp[i] = 0;
  sp[11] = reinterpret_cast<uintptr_t>(entry);  // x30
#endif
  return sp;
}

// Runs body(argument) once for each thread of a grid of `blocks` x `threads`. Returns 0, or 1 if memory ran out.
FC_UNWATCHED inline int run_grid(unsigned blocks, unsigned threads, void (*body)(const void*), const void* argument) {
  static thread_local Arena arena;
  const size_t count = size_t(blocks) * threads, warps_per_block = (threads + kWarp - 1) / kWarp;
  const size_t stacks = count * kStackBytes, warps = blocks * warps_per_block * sizeof(Warp);
  char* memory = arena.reserve(stacks + warps + count * sizeof(Fiber) + blocks * sizeof(Block));
  if (!memory) return 1;
  Warp* warp = reinterpret_cast<Warp*>(memory + stacks);
  Fiber* fibers = reinterpret_cast<Fiber*>(memory + stacks + warps);
  Block* block = reinterpret_cast<Block*>(fibers + count);
  for (size_t w = 0; w < blocks * warps_per_block; w++) {
    for (unsigned lane = 0; lane < kWarp; lane++) warp[w].gate[lane] = Gate{0, 0};
  }
  for (unsigned b = 0; b < blocks; b++) block[b] = Block{b, threads, {0, 0}, warp + b * warps_per_block};
  for (size_t i = 0; i < count; i++) {
    fibers[i] = Fiber{first_frame(memory + (i + 1) * kStackBytes, fiber_main), block + i / threads,
                      unsigned(i % threads), false, FC_FIBER_CREATE()};
  }
  Grid g = {fibers, unsigned(count), 0, unsigned(count), blocks, threads, nullptr, FC_FIBER_CURRENT(), body, argument};
  grid() = &g;
  FC_FIBER_SWITCH(fibers[0].watched);
  fc_fiber_switch(&g.main_stack_pointer, fibers[0].stack_pointer);
  FC_FIBER_ACQUIRE(&g);
  for (size_t i = 0; i < count; i++) FC_FIBER_DESTROY(fibers[i].watched);
  grid() = nullptr;
  return 0;
}

}  // namespace fc_cpu
