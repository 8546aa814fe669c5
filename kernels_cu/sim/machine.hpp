// What a kernel in the simulator may ask of the machine that runs it. Memory is simulated: an address is a number, and every
// access is a call of the engine, which may let any other thread run first and picks which store a load sees.
#pragma once

namespace fc_sim {

// Who runs now.
struct Context {
  unsigned thread, block, threads, blocks;
  unsigned trigger;  // where the launch's trigger is: FC_TRIGGER of primitives.cuh
};

enum Order : unsigned { kPlain, kRelaxed, kAcquire, kRelease };
enum Modify : unsigned { kExchange, kIncrementAndWrap };

struct Machine {
  const Context* self;
  void (*load)(unsigned long long at, unsigned bytes, unsigned order, void* value);
  void (*store)(unsigned long long at, unsigned bytes, unsigned order, const void* value);
  // One store instruction of eight converged lanes, 16 bytes each.
  void (*store_line)(unsigned long long at, unsigned mask, const void* value);
  unsigned (*modify)(unsigned long long at, unsigned how, unsigned operand);
  void (*fence)(unsigned sequentially_consistent);
  // Lanes of a warp meet and count their votes; that alone orders no memory.
  unsigned (*vote)(unsigned mask, unsigned predicate);
  // Lanes of a warp, or with mask 0 all threads of the block that have not returned, meet; memory is ordered.
  void (*meet)(unsigned mask);
  void (*pause)();
  void (*launch_wait)();
  void (*launch_dependents)();
};

}  // namespace fc_sim
