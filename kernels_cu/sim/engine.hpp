// The simulator: all ranks' blocks and threads as fibers of one OS thread, under one seeded scheduler, with a weak memory.
//
// Memory. A location is the largest piece that the link does not tear: 4, 8 or 16 bytes, as the host's table says. Each has
// its history, the messages stored there in modification order, with timestamps. Each thread has a view: for each
// location the oldest message it may still read.
// - A store takes any free timestamp above the thread's own view, not only the newest. A load returns any message not older
//   than the view, and moves the view.
// - A message carries the writer's view as of its last release fence, or as of now where it is a release itself. An acquire
//   joins it; a relaxed load keeps it for the next acquire fence. A release of a location covers the thread's later stores
//   there.
// - The completion of a grid releases and acquires for all its threads; a launch, or the wait of a dependent launch, starts
//   from what the grid before it knew. Before that wait a thread knows nothing. A block's barrier and a warp's join the
//   views of their threads; a vote does not.
// - A 128-byte line is one event of its pieces: who has seen one of them, has seen them all.
// Views also hold a clock for each thread, which makes them vector clocks: plain accesses that no such order separates race.
//
// Schedules. Everything that is undetermined is a decision: who runs next, which message is read, where a store lands. A
// decision comes from a generator seeded with the schedule's number, or from a list that enumerates all of them.
#pragma once
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <vector>

#include "cpu/fiber.hpp"
#include "sim/machine.hpp"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fc_sim {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- what the host tells and is told (fcomm/backends/sim.py has the same structs) -------------------------------------
struct Launch {
  u64 body, params;  // body 0: a step of the host's, which checks what the grid before it left and stores new input
  u64 in_at, in_bytes, out_at, out_bytes;
  u64 expected;                   // address of out_bytes bytes, or 0
  u64 fill_at, fill_bytes, fill;  // a step's: fill_bytes bytes from address `fill` go to fill_at
  u32 rank, stream, blocks, threads, call, dependent, trigger, waits, alike, reserved;
};

// Properties of 16 bytes of a slab.
enum CellFlags : u8 {
  kRemoteWrites = 1,  // a peer may write here: the slot's source, or any where there is none
  kRemoteReads = 2,
  kOwnWrites = 4,
  kOwnReads = 8,
  kChecked = 16,   // what a peer stores here is read before it is overwritten
  kSentinel = 32,  // empty cells hold a word that says so
  kLine = 64,      // cells are written a line at a time
  kWords = 128,    // counters and the like: no payload
};

struct Setup {
  u32 ranks, devices, launches, weak;
  u32 line_bytes;  // of a line, what the link does not tear
  u32 reserved;
  u64 slab_bytes, array_bytes;
  const u64* images;  // for each rank: address of slab_bytes bytes, the slab before the first call
  const u8* grain;    // for each 16 bytes of a slab: 4, 8 or 16
  const u8* source;   // the rank whose slot it is, or 255
  const u8* flags;
  const u32* device_of;  // for each rank
  const u32* capacity;   // for each device: blocks that may be resident
  const Launch* launch;  // each stream's in order
};

enum Kind : u32 { kNone, kStale, kTorn, kEmpty, kUnread, kDeadlock, kWrong, kRankDependent, kOutside, kRace, kBudget };

struct Result {
  u64 schedules, steps, seed;
  u64 at, bytes;
  u32 kind, rank, call, block, thread, other_rank, other_call, more;
};

enum Event : u32 {
  kELoad,
  kEStore,
  kELine,
  kEModify,
  kEStart,
  kEEnd,
  kEWait,
  kETrigger,
  kEOutput,
  kEInput,
  kEStep,
  kEMeet,
};
struct EventRecord {
  u64 at;
  u32 event, bytes, order, rank, call, block, thread, from_rank, from_call, behind, values[4], reserved;
};

constexpr u64 kSlabBase(u32 rank) { return u64(rank + 1) << 33; }
constexpr u64 kArrayBase(u32 rank) { return (u64(rank + 1) << 33) + (1ull << 32); }
constexpr size_t kStack = 24 * 1024;
constexpr int kGap = 1 << 14;
constexpr u64 kMostSteps = 40u << 20;  // a schedule that takes more is stuck in a way that no one thought of

// ---- state ------------------------------------------------------------------------------------------------------------
struct Message {
  int ts;
  u32 call;
  u16 rank;  // 0xffff: there from the beginning
  u8 mask, source, read, rearm;
  const int* view;
  const u32* line;  // locations of the other pieces of the same event, ended by 0; timestamps in line_ts
  const int* line_ts;
  u32 w[4];
};

struct Location {
  u64 at;
  u32 stamp, words, cell;  // cell: index of 16 bytes in the slab
  u32 owner;
  std::vector<Message> history;
};

struct Shadow {
  u32 stamp;
  int wslot, wclock, rslot[2], rclock[2];
};

struct Grid;
struct Block {
  Grid* grid;
  u32 index, live, arrived;
  bool triggered;
  std::vector<int> pool;
  struct Group {
    u32 mask, arrived, votes, result;
    int* pool;
    u64 at;
    u32 cells[8][4];
    struct Fiber* lane[8];
  };
  std::vector<Group> groups;
};

enum State : u8 { kRunnable, kIdle, kBlocked, kDone };

struct Seen {
  u64 cell;
  u8 fresh, old, empty, later;  // of this call, of an earlier one, of none, of a later one
};

struct Fiber {
  void* sp;
  char* stack;
  Context context;
  Block* block;
  Grid* grid;
  State state;
  u32 slot, place;  // place among the runnable
  int* view;
  const int* released;
  std::vector<const int*> pending;
  std::vector<std::pair<u32, const int*>> releases;  // locations that it has released, and its view then
  std::vector<u32> polled, newest;  // locations read stale since the last pause; those to be read fresh after it
  bool waited, stale_read;
  bool votes, quiet;  // it polls together with other lanes; it has seen nothing new since its last pause
  u32 polled_owner, version, priority;
  std::vector<Seen> seen;
  size_t seen_from, seen_now;
  bool loads_since_output;
};

struct Stream;
struct Grid {
  const Launch* launch;
  Stream* stream;
  u32 index, next_block, blocks_left, triggers_left;
  bool complete;
  int* view;         // what its threads knew when they ended
  const int* start;  // what they know when they begin
  std::vector<Fiber*> fibers;
  std::vector<Fiber*> waiting;  // of the next grid's
};

// A stream's launcher is a runnable, too: it brings one block in at a time.
struct Stream {
  u32 rank, next, completed, place, priority;
  bool listed;
  int* view;  // of all grids so far
  std::vector<Grid*> grids;
};

struct Random {
  u64 s;
  u64 next() {
    u64 z = (s += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u32 below(u32 n) { return u32((next() >> 32) * n >> 32); }
  bool chance(u32 of65536) { return (next() >> 48) < of65536; }
};

inline void join(int* __restrict a, const int* __restrict b, u32 n) {
  for (u32 i = 0; i < n; i++) a[i] = a[i] < b[i] ? b[i] : a[i];
}

class Sim;
static thread_local Sim* sim = nullptr;

class Sim {
 public:
  explicit Sim(const Setup& s) : setup_(s) {
    machine_ = {&idle_context_, sim_load, sim_store, sim_line, sim_modify, sim_fence,
                sim_vote,       sim_meet, sim_pause, sim_wait, sim_trigger};
    id_.resize(s.ranks);
    for (auto& v : id_) v.assign(s.slab_bytes / 4, 0);
    array_.resize(s.ranks);
    shadow_.resize(s.ranks);
    for (u32 r = 0; r < s.ranks; r++) {
      array_[r].assign(s.array_bytes, 0);
      shadow_[r].assign(s.array_bytes, Shadow{});
    }
    locations_.resize(1);  // 0 is none
    version_.resize(s.ranks);
    free_.resize(s.devices);
    u32 threads = 0, streams = 0;
    for (u32 i = 0; i < s.launches; i++) {
      streams = std::max(streams, s.launch[i].stream + 1);
    }
    streams_per_rank_ = streams;
    std::vector<u32> most(s.ranks * streams, 1);
    for (u32 i = 0; i < s.launches; i++) {
      u32& m = most[s.launch[i].rank * streams + s.launch[i].stream];
      m = std::max(m, s.launch[i].blocks * s.launch[i].threads);
    }
    for (u32 m : most) threads += 4 * m + 4;  // grids of a stream that overlap: the last two and steps that do not wait
    slots_ = threads;
    capacity_ = 512;
  }
  ~Sim() {
    for (char* p : stacks_) free(p);
    for (char* p : arena_chunks_) free(p);
    for (Fiber* f : fibers_) delete f;
    for (Block* b : blocks_) delete b;
  }

  Machine* machine() { return &machine_; }
  const u8* array_of(u32 rank) const { return array_[rank].data(); }

  // Runs schedules seed, seed + 1, ... until one violates something.
  Result random(u64 seed, u64 count, double seconds, EventRecord* events, u32 most_events, u32* events_made) {
    Result total = {};
    total.seed = seed;
    const u64 end_ns = seconds > 0 ? clock_ns() + u64(seconds * 1e9) : ~0ull;
    for (u64 k = 0; k < count; k++) {
      exhaustive_ = false;
      trace_ = events;
      trace_room_ = most_events;
      run(seed + k, total);
      if (events_made) *events_made = trace_made_;
      total.schedules++;
      if (total.kind != kNone) {
        total.seed = seed + k;
        break;
      }
      if (k % 16 == 15 && clock_ns() > end_ns) break;
    }
    return total;
  }

  // All schedules that depart at most `bound` times from: go on with whoever runs, read the newest, store last. The list of
  // decisions is kept between calls, so that a long search can be done in parts; `fresh` begins anew.
  Result exhaust(u32 bound, u64 most, bool fresh) {
    Result total = {};
    if (fresh) {
      choices_.clear();
      finished_ = false;
    }
    while (!finished_ && total.schedules < most && total.kind == kNone) {
      exhaustive_ = true;
      trace_ = nullptr;
      run(0, total);
      total.schedules++;
      if (total.kind != kNone) break;
      next_choices(bound);
    }
    total.more = !finished_;
    return total;
  }
  // Runs the schedule of the current list of decisions again, with a trace.
  Result again(EventRecord* events, u32 most_events, u32* events_made) {
    Result total = {};
    exhaustive_ = true;
    trace_ = events;
    trace_room_ = most_events;
    run(0, total);
    *events_made = trace_made_;
    return total;
  }

  // The value that a location ends with.
  void final_value(u64 at, u32 bytes, u8* value) {
    const u32 rank = u32(at >> 33) - 1;
    for (u32 done = 0; done < bytes;) {
      Location& l = location(rank, at + done - kSlabBase(rank));
      u32 w[4];
      compose(l, l.history.size() - 1, w, nullptr);
      const u32 from = u32(at + done - l.at), n = std::min(bytes - done, l.words * 4 - from);
      memcpy(value + done, reinterpret_cast<u8*>(w) + from, n);
      done += n;
    }
  }

  // ---- what kernels call ------------------------------------------------------------------------------------------------
  void load(u64 at, u32 bytes, u32 order, void* value) {
    if (order == kPlain) return plain(at, bytes, false, value);
    const u32 owner = owner_of(at, bytes, false);
    const u64 offset = at - kSlabBase(owner);
    u8* out = static_cast<u8*>(value);
    Seen seen = {at & ~15ull, 0, 0, 0, 0};
    for (u32 done = 0; done < bytes;) {
      decision_point();
      Location& l = location(owner, offset + done);
      const u32 from = u32(offset + done) % (l.words * 4), n = std::min(bytes - done, l.words * 4 - from);
      read(l, from, n, order, out + done, &seen);
      done += n;
    }
    self_->polled_owner = owner;
    remember(seen);
  }

  void store(u64 at, u32 bytes, u32 order, const void* value) {
    if (order == kPlain) return plain(at, bytes, true, const_cast<void*>(value));
    const u32 owner = owner_of(at, bytes, true);
    const u64 offset = at - kSlabBase(owner);
    const u8* in = static_cast<const u8*>(value);
    const int* view = nullptr;
    if (order == kRelease) {
      decision_point();
      view = snapshot(self_->view);
      tick();
    }
    for (u32 done = 0; done < bytes;) {
      if (order != kRelease) decision_point();
      Location& l = location(owner, offset + done);
      const u32 from = u32(offset + done) % (l.words * 4), n = std::min(bytes - done, l.words * 4 - from);
      Message m = message(l, order == kRelease ? view : carried(l));
      put(m, from, n, in + done);
      insert(l, m, self_, order);
      if (order == kRelease) released_at(id_of(l), view);
      done += n;
    }
    changed(owner);
  }

  void store_line(u64 at, u32 mask, const void* value) {
    Block::Group& g = group(mask);
    const u32 lane = self_->context.thread % 32 - u32(__builtin_ctz(mask));
    memcpy(g.cells[lane], value, 16);
    g.lane[lane] = self_;
    if (lane == 0) g.at = at;
    if (!arrive(g)) return;
    // The last lane of the line does it for all: one event for what the link does not tear. The fibers' views are their own.
    const u32 owner = owner_of(g.at, 128, true), lanes = u32(__builtin_popcount(mask));
    const u32 grain = setup_.grain[(g.at - kSlabBase(owner)) / 16];
    if (grain < 16) {  // not even cells arrive whole
      for (u32 byte = 0; byte < 16 * lanes; byte += grain) {
        decision_point();
        Location& l = location(owner, g.at - kSlabBase(owner) + byte);
        Message m = message(l, g.lane[byte / 16]->released);
        put(m, 0, grain, reinterpret_cast<u8*>(g.cells) + byte);
        insert(l, m, g.lane[byte / 16], kRelaxed);
      }
      changed(owner);
      open(g);
      return;
    }
    const u32 cells = std::max(1u, setup_.line_bytes / 16);
    for (u32 first = 0; first < lanes; first += cells) {
      decision_point();
      const u32 end = std::min(lanes, first + cells);
      u32* line = reinterpret_cast<u32*>(arena(4 * (end - first + 1)));
      int* line_ts = reinterpret_cast<int*>(arena(4 * (end - first)));
      u32 n = 0;
      for (u32 k = first; k < end; k++) line[n++] = id_at(owner, g.at - kSlabBase(owner) + 16 * k);
      line[n] = 0;
      // All pieces land behind the same number of newer messages, if these are of one event; else last.
      u32 behind = ~0u;
      for (u32 k = 0; k < n; k++) behind = std::min(behind, free_behind(locations_[line[k]], g.lane[first + k]));
      if (behind > 0 && !whole_events(line, n, behind)) behind = 0;
      if (behind > 0) behind = choose_behind(behind);
      for (u32 k = 0; k < n; k++) {
        Location& l = locations_[line[k]];
        Message m = message(l, g.lane[first + k]->released);
        if (n > 1) {
          m.line = line;
          m.line_ts = line_ts;
        }
        put(m, 0, 16, reinterpret_cast<u8*>(g.cells[first + k]));
        line_ts[k] = insert_behind(l, m, g.lane[first + k], behind);
        note(kELine, l.at, 16, 0, m.rank, m.call, behind, m.w);
        if (trace_) trace_[(trace_made_ - 1) % trace_room_].thread = g.lane[first + k]->context.thread;
      }
      for (u32 k = 0; k < n; k++) check_around(locations_[line[k]], line_ts[k]);
    }
    changed(owner);
    open(g);
  }

  u32 modify(u64 at, u32 how, u32 operand) {
    const u32 owner = owner_of(at, 4, true);
    decision_point();
    Location& l = location(owner, at - kSlabBase(owner));
    u32 w[4];
    compose(l, l.history.size() - 1, w, nullptr);
    const u32 k = u32(at - l.at) / 4, old = w[k];
    const Message& newest = l.history.back();
    Message m = message(l, joined(self_->released, newest.view));
    const u32 value = how == kExchange ? operand : old >= operand ? 0 : old + 1;
    put(m, 4 * k, 4, reinterpret_cast<const u8*>(&value));
    pend(newest.view);
    insert_behind(l, m, self_, 0);
    changed(owner);
    note(kEModify, at, 4, how, 0, 0, 0, &value);
    return old;
  }

  void fence(u32 sequentially_consistent) {
    Fiber* f = self_;
    decision_point();
    for (const int* v : f->pending) join(f->view, v, width());
    f->pending.clear();
    if (sequentially_consistent) {
      join(f->view, order_view_, width());
      memcpy(order_view_, f->view, width() * 4);
    }
    f->released = snapshot(f->view);
    tick();
  }

  u32 vote(u32 mask, u32 predicate) {
    Block::Group& g = group(mask);
    if (predicate) g.votes++;
    self_->votes = true;
    if (arrive(g)) {
      g.result = g.votes;
      g.votes = 0;
      open(g);
      sleep_together(g);
    }
    return group(mask).result;  // no lane can come to the next vote before all have read this
  }

  void meet(u32 mask) {
    Fiber* f = self_;
    if (mask == 0) {
      Block* b = f->block;
      if (b->pool.empty()) b->pool.assign(width_max(), 0);
      join(b->pool.data(), f->view, width());
      tick();
      b->arrived++;
      if (b->arrived >= b->live) {
        open(b);
      } else {
        f->state = kBlocked;
        unlist(f);
        go_on();
      }
      return;
    }
    Block::Group& g = group(mask);
    if (!g.pool) g.pool = zeros();
    join(g.pool, f->view, width());
    tick();
    if (arrive(g)) {
      for (Fiber* x : f->block->grid->fibers) {
        if (same_warp(x, mask)) join(x->view, g.pool, width());
      }
      memset(g.pool, 0, width_max() * 4);
      open(g);
    }
  }

  void pause() {
    Fiber* f = self_;
    const u32 now = version_[f->polled_owner];
    f->quiet = f->version == now && !f->stale_read;
    if (f->quiet && !f->votes) {
      f->state = kIdle;  // it has seen the newest of everything: nothing changes before somebody stores
      idle_[f->polled_owner].push_back(f);
      unlist(f);
    } else {
      f->newest.clear();
      if (f->version == now) f->newest.swap(f->polled);  // once round without news: next time it sees what there is
      f->version = now;
    }
    f->polled.clear();
    f->stale_read = false;
    go_on();
  }

  void launch_wait() {
    Fiber* f = self_;
    if (f->waited) return;
    const Grid* before = f->grid->stream->grids[f->grid->index - 1];
    if (!before->complete) {
      f->state = kBlocked;
      f->grid->stream->grids[f->grid->index - 1]->waiting.push_back(f);
      unlist(f);
      go_on();
    }
    f->waited = true;
    join(f->view, before->view, width());
    f->released = before->view;  // which changes no more
    tick();
    note(kEWait, 0, 0, 0, 0, 0, 0, nullptr);
  }

  void trigger() {
    decision_point();
    note(kETrigger, 0, 0, 0, 0, 0, 0, nullptr);
    trigger(self_->block);
  }

  // ---- a fiber's life -----------------------------------------------------------------------------------------------------
  static void entry() {
    Sim* s = sim;
    const Launch& l = *s->self_->grid->launch;
    if (l.body) {
      reinterpret_cast<void (*)(const void*)>(l.body)(reinterpret_cast<const void*>(l.params));
    } else {
      s->step(l);
    }
    s->returned();
    __builtin_unreachable();
  }

 private:
  // ---- decisions ----------------------------------------------------------------------------------------------------------
  struct Choice {
    u16 taken, of;
  };

  u32 decide(u32 n) {  // exhaustive only
    if (n < 2) return 0;
    if (decision_ == choices_.size()) choices_.push_back(Choice{0, u16(n)});
    choices_[decision_].of = u16(n);
    return choices_[decision_++].taken;
  }

  void next_choices(u32 bound) {
    choices_.resize(decision_);
    u32 spent = 0;
    for (const Choice& c : choices_) spent += c.taken != 0;
    while (!choices_.empty()) {
      Choice& c = choices_.back();
      const u32 before = spent - (c.taken != 0);
      if (before + 1 <= bound && c.taken + 1 < c.of) {
        c.taken++;
        return;
      }
      spent = before;
      choices_.pop_back();
    }
    finished_ = true;
  }

  // Before an access: others may come first.
  void decision_point() {
    if (++steps_ > kMostSteps) violation(kBudget, 0, 0);
    if (exhaustive_) {
      const u32 n = u32(runnable_.size());
      if (n < 2) return;
      const u32 k = decide(n);
      if (k == 0) return;
      switch_to((self_->place + k) % n);
      return;
    }
    if (preemptions_ == 0 || !random_.chance(preempt_)) return;
    preemptions_--;
    if (mode_ != 0) self_->priority = --lowest_;
    go_on();
  }

  // Of how many newer messages a store lands in front.
  u32 choose_behind(u32 most) {
    if (most == 0 || !setup_.weak) return 0;
    if (exhaustive_) return decide(most + 1);
    return random_.chance(late_) ? 1 + random_.below(most) : 0;
  }

  // ---- scheduling -----------------------------------------------------------------------------------------------------------
  // Runnables are fibers (even) and launchers of streams (odd addresses).
  static bool is_stream(u64 r) { return r & 1; }
  static Fiber* fiber_of(u64 r) { return reinterpret_cast<Fiber*>(r); }
  static Stream* stream_of(u64 r) { return reinterpret_cast<Stream*>(r & ~1ull); }

  void list(Fiber* f) {
    f->state = kRunnable;
    f->place = u32(runnable_.size());
    runnable_.push_back(reinterpret_cast<u64>(f));
  }
  void list(Stream* s) {
    s->listed = true;
    s->place = u32(runnable_.size());
    runnable_.push_back(reinterpret_cast<u64>(s) | 1);
  }
  void remove(u32 place) {
    const u64 last = runnable_.back();
    runnable_[place] = last;
    (is_stream(last) ? stream_of(last)->place : fiber_of(last)->place) = place;
    runnable_.pop_back();
  }
  void unlist(Fiber* f) { remove(f->place); }

  // Whether the stream's next block may come in now.
  bool admissible(const Stream& s) const {
    if (s.next == s.grids.size()) return false;
    const Grid& g = *s.grids[s.next];
    if (free_[setup_.device_of[s.rank]] == 0) return false;
    if (g.next_block > 0 || s.next == 0) return true;
    return g.launch->dependent ? s.grids[s.next - 1]->triggers_left == 0 : s.completed == s.next;
  }
  void look_for_launches() {
    for (Stream* s : streams_) {
      if (!s->listed && admissible(*s)) list(s);
    }
  }

  void admit(Stream* s) {
    Grid* g = s->grids[s->next];
    const Launch& l = *g->launch;
    Block* b = new_block();
    b->grid = g;
    b->index = g->next_block;
    b->live = l.threads;
    b->arrived = 0;
    b->triggered = false;
    b->groups.assign((l.threads + 31) / 32 * 32, Block::Group{});
    free_[setup_.device_of[s->rank]]--;
    const bool waited = !l.dependent || s->next == 0;
    if (!g->view) {
      g->view = zeros();
      g->start = waited ? snapshot(s->view) : zero_view_;
    }
    for (u32 t = 0; t < l.threads; t++) {
      Fiber* f = new_fiber();
      f->context = Context{t, b->index, l.threads, l.blocks, l.trigger};
      f->block = b;
      f->grid = g;
      f->slot = free_slots_.back();
      free_slots_.pop_back();
      f->view = view_buffer();
      memcpy(f->view, g->start, width_max() * 4);
      f->released = g->start;
      f->waited = waited;
      f->view[f->slot] = ++clock_[f->slot];
      f->sp = fc_cpu::first_frame(f->stack + kStack, entry);
      f->priority = mode_ == 1 ? rank_priority_[s->rank] : mode_ == 2 ? 1000000 + random_.below(1000000) : 0;
      g->fibers.push_back(f);
      list(f);
    }
    if (trace_) note_of(kEStart, l.rank, l.call, b->index, l.body ? l.blocks : 0);
    if (++g->next_block == l.blocks) s->next++;
    if (!admissible(*s)) {
      remove(s->place);
      s->listed = false;
    }
    for (Stream* x : streams_) {  // the device may be full now
      if (x->listed && !admissible(*x)) {
        remove(x->place);
        x->listed = false;
      }
    }
  }

  // Somebody else runs: of those who can, whoever the schedule prefers. Called by a fiber that waits, gives way or has ended.
  void go_on() {
    while (true) {
      if (runnable_.empty()) look_for_launches();
      const u32 n = u32(runnable_.size());
      if (n == 0) {
        if (unfinished_ > 0) violation(kDeadlock, 0, 0);
        leave();
      }
      u32 k;
      if (exhaustive_) {
        k = in_plain_order(decide(n));
      } else if (mode_ == 0) {
        k = random_.below(n);
      } else {
        u32 best = 0, ties = 0;
        k = 0;
        for (u32 i = 0; i < n; i++) {
          const u32 p = is_stream(runnable_[i]) ? stream_of(runnable_[i])->priority : fiber_of(runnable_[i])->priority;
          if (ties == 0 || p > best) {
            best = p;
            ties = 1;
            k = i;
          } else if (p == best && random_.below(++ties) == 0) {
            k = i;
          }
        }
      }
      if (is_stream(runnable_[k])) {
        admit(stream_of(runnable_[k]));
        continue;
      }
      resume(fiber_of(runnable_[k]));
      return;
    }
  }
  // The k-th runnable of the plain order, in which a rank goes on as long as it can.
  u32 in_plain_order(u32 k) const {
    const u32 rank = self_ ? self_->grid->launch->rank : 0, n = u32(runnable_.size());
    for (int same = 1; same >= 0; same--) {
      for (u32 i = 0; i < n; i++) {
        const u64 r = runnable_[i];
        const bool mine = (is_stream(r) ? stream_of(r)->rank : fiber_of(r)->grid->launch->rank) == rank;
        if (mine == (same == 1) && k-- == 0) return i;
      }
    }
    return 0;
  }
  void switch_to(u32 k) {
    if (is_stream(runnable_[k])) {
      admit(stream_of(runnable_[k]));
      return;
    }
    resume(fiber_of(runnable_[k]));
  }
  void resume(Fiber* f) {
    Fiber* from = self_;
    if (f == from) return;
    self_ = f;
    machine_.self = &f->context;
    fc_fiber_switch(from ? &from->sp : &main_sp_, f->sp);
  }
  void leave() {
    void* unused;
    if (!self_) abort();  // the host sees to it that a grid can start
    self_ = nullptr;
    fc_fiber_switch(&unused, main_sp_);
  }

  void wake_idle(u32 owner) {
    for (Fiber* f : idle_[owner]) {
      f->newest.clear();
      list(f);
    }
    idle_[owner].clear();
  }
  void changed(u32 owner) {
    version_[owner]++;
    if (!idle_[owner].empty()) wake_idle(owner);
  }

  void trigger(Block* b) {
    if (b->triggered) return;
    b->triggered = true;
    if (--b->grid->triggers_left == 0) look_for_launches();
  }

  void open(Block* b) {
    for (Fiber* x : b->grid->fibers) {
      if (x->block != b || x->state == kDone) continue;
      join(x->view, b->pool.data(), width());
      if (x->state == kBlocked) list(x);
    }
    b->arrived = 0;
    memset(b->pool.data(), 0, b->pool.size() * 4);
  }

  // Lanes that meet: at most four groups of eight in a warp, or the whole warp; told apart by mask and warp.
  Block::Group& group(u32 mask) {
    Block* b = self_->block;
    Block::Group& g = b->groups[self_->context.thread / 32 * 32 + u32(__builtin_ctz(mask))];
    g.mask = mask;
    return g;
  }
  // Lanes that poll together go round together: they sleep when none of them has seen anything new.
  void sleep_together(const Block::Group& g) {
    const Fiber* f = self_;
    for (const Fiber* x : f->grid->fibers) {
      if (same_warp(x, g.mask) && (!x->quiet || x->version != version_[x->polled_owner])) return;
    }
    for (Fiber* x : f->grid->fibers) {
      if (!same_warp(x, g.mask)) continue;
      x->state = kIdle;
      idle_[x->polled_owner].push_back(x);
      unlist(x);
    }
    go_on();
  }
  bool same_warp(const Fiber* x, u32 mask) const {
    return x->block == self_->block && x->context.thread / 32 == self_->context.thread / 32 &&
           (mask >> x->context.thread % 32 & 1);
  }
  // True in the last lane to arrive; the others come back when it has called open().
  bool arrive(Block::Group& g) {
    if (++g.arrived == u32(__builtin_popcount(g.mask))) return true;
    self_->state = kBlocked;
    unlist(self_);
    go_on();
    return false;
  }
  void open(Block::Group& g) {
    Fiber* f = self_;
    g.arrived = 0;
    for (Fiber* x : f->grid->fibers) {
      if (x != f && x->state == kBlocked && same_warp(x, g.mask)) list(x);
    }
  }

  void returned() {
    Fiber* f = self_;
    Grid* g = f->grid;
    Block* b = f->block;
    f->state = kDone;
    unlist(f);
    join(g->view, f->view, width());
    for (const int* v : f->pending) join(g->view, v, width());
    view_pool_.push_back(f->view);
    f->view = nullptr;
    b->live--;
    if (b->live > 0 && b->arrived >= b->live) open(b);  // a thread that has returned no longer counts
    if (b->live == 0) {
      trigger(b);
      free_[setup_.device_of[g->launch->rank]]++;
      if (--g->blocks_left == 0) complete(g);
      look_for_launches();
    }
    go_on();
  }

  void complete(Grid* g) {
    Stream* s = g->stream;
    g->complete = true;
    unfinished_--;
    join(s->view, g->view, width());
    while (s->completed < s->grids.size() && s->grids[s->completed]->complete) s->completed++;
    for (Fiber* f : g->fibers) free_slots_.push_back(f->slot);
    for (Fiber* f : g->waiting) list(f);
    g->waiting.clear();
    if (trace_) note_of(kEEnd, g->launch->rank, g->launch->call, 0, g->launch->body != 0);
  }

  // ---- memory -----------------------------------------------------------------------------------------------------------------
  u32 width() const { return slots_ + u32(locations_.size()); }
  u32 width_max() const { return slots_ + capacity_; }

  char* arena(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (arena_used_ + bytes > kChunk || arena_chunks_.empty()) {
      if (!arena_chunks_.empty()) arena_at_++;
      if (arena_at_ >= arena_chunks_.size()) {
        arena_chunks_.push_back(static_cast<char*>(aligned_alloc(64, kChunk)));
        arena_at_ = arena_chunks_.size() - 1;
      }
      arena_used_ = 0;
    }
    char* p = arena_chunks_[arena_at_] + arena_used_;
    arena_used_ += bytes;
    return p;
  }
  int* view_buffer() {
    if (!view_pool_.empty()) {
      int* v = view_pool_.back();
      view_pool_.pop_back();
      return v;
    }
    return reinterpret_cast<int*>(arena(width_max() * 4));
  }
  int* zeros() {
    int* v = view_buffer();
    memset(v, 0, width_max() * 4);
    return v;
  }
  const int* snapshot(const int* view) {
    int* v = reinterpret_cast<int*>(arena(width_max() * 4));
    memcpy(v, view, width_max() * 4);
    return v;
  }
  const int* joined(const int* a, const int* b) {
    if (!b) return a;
    int* v = const_cast<int*>(snapshot(a));
    join(v, b, width());
    return v;
  }
  // A release of a location also covers the thread's later strong stores there (PTX's second release pattern).
  void released_at(u32 id, const int* view) {
    for (auto& r : self_->releases) {
      if (r.first == id) {
        r.second = view;
        return;
      }
    }
    self_->releases.emplace_back(id, view);
  }
  const int* carried(const Location& l) {
    for (const auto& r : self_->releases) {
      if (r.first == id_of(l)) return joined(r.second, self_->released);
    }
    return self_->released;
  }
  void tick() { self_->view[self_->slot] = ++clock_[self_->slot]; }
  void pend(const int* view) {
    if (!view || view == self_->released) return;
    auto& p = self_->pending;
    if (std::find(p.begin(), p.end(), view) == p.end()) p.push_back(view);
  }

  // The rank whose slab an access goes to, if it may.
  u32 owner_of(u64 at, u32 bytes, bool write) {
    const u32 owner = u32(at >> 33) - 1, rank = self_->grid->launch->rank;
    if ((at >> 33) == 0 || owner >= setup_.ranks || (at - kSlabBase(owner)) + bytes > setup_.slab_bytes ||
        at % (bytes < 16 ? bytes : 16)) {
      violation(kOutside, at, bytes);
    }
    const u64 cell = (at - kSlabBase(owner)) / 16;
    const u8 flags = setup_.flags[cell], source = setup_.source[cell];
    const bool own = owner == rank;
    bool fine = own ? flags & (write ? kOwnWrites : kOwnReads) : flags & (write ? kRemoteWrites : kRemoteReads);
    if (!own && write && source != 255 && source != rank) fine = false;
    if (!fine) violation(kOutside, at, bytes);
    return owner;
  }

  u32 id_at(u32 owner, u64 offset) {
    const u32 grain = setup_.grain[offset / 16];
    const u64 word = offset / grain * grain / 4;
    u32& id = id_[owner][word];
    if (id == 0) {
      if (locations_.size() >= capacity_) {
        grow_ = true;
        leave();
      }
      id = u32(locations_.size());
      locations_.emplace_back();
      Location& l = locations_.back();
      l.at = kSlabBase(owner) + word * 4;
      l.words = grain / 4;
      l.cell = u32(offset / 16);
      l.owner = owner;
      l.stamp = 0;
    }
    Location& l = locations_[id];
    if (l.stamp != stamp_) {
      l.stamp = stamp_;
      l.history.clear();
      Message m = {};
      m.rank = 0xffff;
      m.mask = u8((1u << l.words) - 1);
      m.read = 1;
      memcpy(m.w, reinterpret_cast<const u8*>(setup_.images[owner]) + (l.at - kSlabBase(owner)), l.words * 4);
      l.history.push_back(m);
    }
    return id;
  }
  Location& location(u32 owner, u64 offset) { return locations_[id_at(owner, offset)]; }
  u32 id_of(const Location& l) const { return u32(&l - locations_.data()); }

  // The location's content as of the i-th message; marks which messages it is made of.
  static void compose(const Location& l, size_t i, u32* w, u64* parts) {
    u32 missing = (1u << l.words) - 1;
    for (size_t k = i;; k--) {
      const Message& m = l.history[k];
      u32 take = m.mask & missing;
      missing &= ~take;
      for (u32 j = 0; take; j++, take >>= 1) {
        if (take & 1) {
          w[j] = m.w[j];
          if (parts) parts[j] = k;
        }
      }
      if (!missing) return;
    }
  }

  // A store of less than the location is no part of an untorn unit: a load that sees it, or what came later, may still see
  // other such words as they were. Returns whether one is.
  bool some_words_older(const Location& l, u32 first, u32 end, size_t oldest, u32* w, u64* parts) {
    u32 before[4];
    u64 parts_before[4];
    bool any = false, composed = false, older = false;
    u64 last = ~0ull;
    for (u32 j = first; j < end; j++) {
      const u64 part = parts[j];
      if (part <= oldest || l.history[part].mask == (1u << l.words) - 1) continue;
      if (part != last) older = exhaustive_ ? decide(2) != 0 : random_.chance(stale_);
      last = part;
      if (!older) continue;
      if (!composed) compose(l, oldest, before, parts_before);
      composed = any = true;
      w[j] = before[j];
      parts[j] = parts_before[j];
    }
    return any;
  }

  void read(Location& l, u32 from, u32 bytes, u32 order, u8* out, Seen* seen) {
    Fiber* f = self_;
    const u32 id = id_of(l);
    const int view = f->view[slots_ + id];
    const size_t newest = l.history.size() - 1;
    size_t oldest = newest;
    while (l.history[oldest].ts > view) oldest--;
    size_t k = newest;
    const bool free =
        oldest < newest && setup_.weak && std::find(f->newest.begin(), f->newest.end(), id) == f->newest.end();
    if (free) {
      if (exhaustive_) {
        k = newest - decide(u32(newest - oldest + 1));
      } else if (random_.chance(stale_)) {
        k = oldest + random_.below(u32(newest - oldest));
      }
    }
    bool stale = k != newest;
    u32 w[4];
    u64 parts[4];
    compose(l, k, w, parts);
    if (free && k > oldest) stale |= some_words_older(l, from / 4, (from + bytes + 3) / 4, oldest, w, parts);
    if (stale) {
      f->stale_read = true;
      f->polled.push_back(id);
    }
    memcpy(out, reinterpret_cast<u8*>(w) + from, bytes);
    f->view[slots_ + id] = std::max(f->view[slots_ + id], l.history[k].ts);
    for (u32 j = from / 4; j < (from + bytes + 3) / 4; j++) {
      if (j > from / 4 && parts[j] == parts[j - 1]) continue;
      Message& m = l.history[parts[j]];
      if (f->grid->launch->rank == l.owner) m.read = 1;
      if (m.line) {
        for (u32 i = 0; m.line[i]; i++) {
          int& v = f->view[slots_ + m.line[i]];
          v = std::max(v, m.line_ts[i]);
        }
      }
      if (m.view) {
        if (order == kAcquire) {
          join(f->view, m.view, width());
        } else {
          pend(m.view);
        }
      }
      if (m.rank == 0xffff || m.rearm) {
        seen->empty = 1;
      } else if (m.call == f->grid->launch->call) {
        seen->fresh = 1;
      } else if (m.call > f->grid->launch->call) {
        seen->later = 1;
      } else {
        seen->old = 1;
      }
      if (trace_) {
        u32 n = 1;
        while (j + n < (from + bytes + 3) / 4 && parts[j + n] == parts[j]) n++;
        note(kELoad, l.at + 4 * j, 4 * n, order, m.rank, m.call, u32(newest - k), w + j);
      }
    }
  }

  Message message(const Location& l, const int* view) {
    Message m = {};
    m.rank = u16(self_->grid->launch->rank);
    m.call = self_->grid->launch->call;
    m.view = view;
    m.source = setup_.source[l.cell];
    m.rearm = m.rank == l.owner && m.source != 255 && m.source != m.rank;
    return m;
  }
  static void put(Message& m, u32 from, u32 bytes, const u8* value) {
    memcpy(reinterpret_cast<u8*>(m.w) + from, value, bytes);
    for (u32 j = from / 4; j < (from + bytes + 3) / 4; j++) m.mask |= u8(1u << j);
  }

  // How many of the newest messages the fiber's next store could land in front of.
  u32 free_behind(const Location& l, const Fiber* f) const {
    const int view = f->view[slots_ + id_of(l)];
    u32 n = 0;
    while (n < l.history.size() && l.history[l.history.size() - 1 - n].ts > view) n++;
    return n;
  }
  // Whether the newest `behind` messages of these locations are, one by one, pieces of the same events.
  bool whole_events(const u32* line, u32 n, u32 behind) const {
    for (u32 b = 1; b <= behind; b++) {
      const auto& h = locations_[line[0]].history;
      const u32* event = h[h.size() - b].line;
      for (u32 k = 0; k < n; k++) {
        const auto& x = locations_[line[k]].history;
        if (!event || x.size() < b || x[x.size() - b].line != event) return false;
      }
    }
    return true;
  }

  void insert(Location& l, Message& m, Fiber* f, u32 order) {
    const u32 most = free_behind(l, f), behind = most ? choose_behind(most) : 0;
    insert_behind(l, m, f, behind);
    if (trace_) {
      for (u32 j = 0; j < l.words; j++) {
        if (m.mask >> j & 1) {
          note(kEStore, l.at + 4 * j, 4 * u32(__builtin_popcount(m.mask)), order, m.rearm, m.call, behind, m.w + j);
          break;
        }
      }
    }
    check_around(l, m.ts);
  }
  int insert_behind(Location& l, Message& m, Fiber* f, u32 behind) {
    auto& h = l.history;
    size_t at = h.size() - behind;
    int before = h[at - 1].ts;
    if (at < h.size() && h[at].ts - before < 2) at = h.size();  // no room between them
    before = h[at - 1].ts;
    m.ts = at == h.size() ? before + kGap : before + (h[at].ts - before) / 2;
    h.insert(h.begin() + long(at), m);
    int& view = f->view[slots_ + id_of(l)];
    view = std::max(view, m.ts);
    return m.ts;
  }
  // What the message with that timestamp covers, or is covered by.
  void check_around(const Location& l, int ts) {
    if (!(setup_.flags[l.cell] & kChecked)) return;
    size_t at = l.history.size() - 1;
    while (l.history[at].ts != ts) at--;
    check_unread(l, at - 1, at);
    if (at + 1 < l.history.size()) check_unread(l, at, at + 1);
  }
  // A message that a peer pushed and nobody has read is covered by another one.
  void check_unread(const Location& l, size_t below, size_t above) {
    const Message &a = l.history[below], &b = l.history[above];
    if (a.read || a.rearm || a.source == l.owner || !(a.mask & b.mask)) return;
    other_rank_ = a.rank;
    other_call_ = a.call;
    violation(kUnread, l.at, l.words * 4);
  }

  // ---- the caller's arrays ------------------------------------------------------------------------------------------------
  void plain(u64 at, u32 bytes, bool write, void* value) {
    Fiber* f = self_;
    const Launch& l = *f->grid->launch;
    if (((at >> 33) == 0 || u32(at >> 33) > setup_.ranks) || at < kArrayBase(l.rank) ||
        at + bytes > kArrayBase(l.rank) + setup_.array_bytes) {
      const bool slab =
          (at >> 33) != 0 && u32(at >> 33) <= setup_.ranks && at - kSlabBase(u32(at >> 33) - 1) < setup_.slab_bytes;
      violation(slab ? kRace : kOutside, at, bytes);  // a plain access where peers store
    }
    if (l.body) {
      const bool out = at >= l.out_at && at + bytes <= l.out_at + l.out_bytes;
      const bool in = at >= l.in_at && at + bytes <= l.in_at + l.in_bytes;
      if (write ? !out : !in && !out) violation(kOutside, at, bytes);
    }
    steps_++;
    const u64 offset = at - kArrayBase(l.rank);
    Shadow* shadow = &shadow_[l.rank][offset];
    const int clock = f->view[f->slot];
    for (u32 i = 0; i < bytes; i++) {
      Shadow& s = shadow[i];
      if (s.stamp != stamp_) s = Shadow{stamp_, -1, 0, {-1, -1}, {0, 0}};
      bool ordered = s.wslot < 0 || f->view[s.wslot] >= s.wclock;
      if (write) {
        for (int k = 0; k < 2; k++) ordered &= s.rslot[k] < 0 || f->view[s.rslot[k]] >= s.rclock[k];
      }
      if (!ordered) violation(kRace, at + i, bytes);
      if (write) {
        s.wslot = int(f->slot);
        s.wclock = clock;
        s.rslot[0] = s.rslot[1] = -1;
      } else {
        const int k = s.rslot[0] < 0 || s.rslot[0] == int(f->slot) || f->view[s.rslot[0]] >= s.rclock[0] ? 0 : 1;
        s.rslot[k] = int(f->slot);
        s.rclock[k] = clock;
      }
    }
    u8* memory = &array_[l.rank][offset];
    if (!write) {
      memcpy(value, memory, bytes);
      return;
    }
    memcpy(memory, value, bytes);
    if (l.body) output(l, at, bytes, memory);
  }

  // An output is compared as it is stored: the thread that stores it has just read what it is made of.
  void output(const Launch& l, u64 at, u32 bytes, const u8* value) {
    Fiber* f = self_;
    if (f->loads_since_output) {
      f->seen_from = f->seen_now;
      f->seen_now = f->seen.size();
      f->loads_since_output = false;
    }
    if (!l.expected) return;
    const u8* expected = reinterpret_cast<const u8*>(l.expected) + (at - l.out_at);
    if (trace_) {
      u32 w[4] = {};
      memcpy(w, value, std::min(bytes, 16u));
      note(kEOutput, at, bytes, memcmp(value, expected, bytes) != 0, 0, 0, 0, w);
    }
    if (l.alike) {  // every rank stores the same
      auto& agreed = agreed_[u64(l.stream) << 32 | l.call];
      agreed.resize(l.out_bytes, 0xffff);
      for (u32 i = 0; i < bytes; i++) {
        u16& a = agreed[at - l.out_at + i];
        if (a == 0xffff) a = value[i];
        if (a != value[i] && pending_ != kNone) pending_ = kRankDependent;
        if (a != value[i]) ranks_differ_ = true;
      }
    }
    if (memcmp(value, expected, bytes) == 0) return;
    // Which of the cells it was made of were not this call's?
    u32 kind = kNone;
    std::vector<u64> done;
    for (size_t i = f->seen.size(); i-- > f->seen_from;) {
      const Seen& s = f->seen[i];
      if (std::find(done.begin(), done.end(), s.cell) != done.end()) continue;
      done.push_back(s.cell);
      if (!s.old && !s.empty && !s.later) continue;
      const u32 owner = u32(s.cell >> 33) - 1;
      const u64 cell = (s.cell - kSlabBase(owner)) / 16;
      const u8 flags = setup_.flags[cell];
      bool torn = s.fresh;
      if (flags & kLine && !torn) {  // another part of the line is this call's
        const u64 first = (s.cell - kSlabBase(owner)) & ~127ull;
        for (u32 k = 0; k < 8; k++) {
          for (const Message& m : location(owner, first + 16 * k).history)
            torn |= m.rank != 0xffff && m.call == l.call && !m.rearm;
        }
      }
      const u32 found = s.later ? kUnread : torn ? kTorn : s.empty && (flags & kSentinel) ? kEmpty : kStale;
      if (kind == kNone || found == kTorn) {
        kind = found;
        at_of_violation_ = s.cell;
      }
    }
    if (kind != kNone) violation(kind, at_of_violation_, 16);
    if (pending_ == kNone) {
      pending_ = ranks_differ_ ? kRankDependent : kWrong;
      pending_result_ = result_of(at, bytes);
    }
  }

  void remember(const Seen& s) {
    Fiber* f = self_;
    const u32 owner = u32(s.cell >> 33) - 1;
    if (setup_.flags[(s.cell - kSlabBase(owner)) / 16] & kWords) return;
    if (!f->seen.empty() && f->seen.back().cell == s.cell && f->seen.size() > f->seen_now) {
      f->seen.back() = s;  // polled again
    } else {
      f->seen.push_back(s);
    }
    f->loads_since_output = true;
  }

  // A step: what follows a collective in its stream. It reads the result and stores the next call's input. Its first block
  // does; others take room.
  void step(const Launch& l) {
    if (l.waits) launch_wait();
    if (self_->context.block != 0) return;
    note(kEStep, l.out_at, u32(l.out_bytes), 0, 0, 0, 0, nullptr);
    u8 word[4];
    decision_point();
    for (u64 i = 0; i < l.out_bytes; i += 4) {
      const u32 n = u32(std::min<u64>(4, l.out_bytes - i));
      plain(l.out_at + i, n, false, word);
      const u8* expected = reinterpret_cast<const u8*>(l.expected) + i;
      if (l.expected && memcmp(word, expected, n) != 0 && pending_ == kNone) {
        pending_ = kWrong;
        pending_result_ = result_of(l.out_at + i, n);
      }
    }
    decision_point();
    for (u64 i = 0; i < l.fill_bytes; i += 4) {
      const u32 n = u32(std::min<u64>(4, l.fill_bytes - i));
      memcpy(word, reinterpret_cast<const u8*>(l.fill) + i, n);
      plain(l.fill_at + i, n, true, word);
    }
  }

  // ---- outcomes -------------------------------------------------------------------------------------------------------------
  Result result_of(u64 at, u64 bytes) const {
    Result r = {};
    r.at = at;
    r.bytes = bytes;
    if (self_) {
      r.rank = self_->grid->launch->rank;
      r.call = self_->grid->launch->call;
      r.block = self_->context.block;
      r.thread = self_->context.thread;
    }
    r.other_rank = other_rank_;
    r.other_call = other_call_;
    return r;
  }
  void violation(u32 kind, u64 at, u64 bytes) {
    if (pending_ != kNone && kind == kDeadlock) leave();  // wrong results came first
    found_ = kind;
    Result r = result_of(at, bytes);
    if (kind == kDeadlock) {  // the first stream that is not through
      for (const Stream* s : streams_) {
        if (s->completed == s->grids.size()) continue;
        const Launch& l = *s->grids[s->completed]->launch;
        r.rank = l.rank;
        r.call = l.call;
        r.more = s->grids[s->completed]->next_block;
        r.block = l.blocks;
        break;
      }
    }
    found_result_ = r;
    leave();
  }

  void note(u32 event, u64 at, u32 bytes, u32 order, u32 from_rank, u32 from_call, u32 behind, const u32* values) {
    if (!trace_) return;
    EventRecord e = {};
    e.at = at;
    e.event = event;
    e.bytes = bytes;
    e.order = order;
    e.rank = self_->grid->launch->rank;
    e.call = self_->grid->launch->call;
    e.block = self_->context.block;
    e.thread = self_->context.thread;
    e.from_rank = from_rank;
    e.from_call = from_call;
    e.behind = behind;
    const u32 words =
        at >= 4096 && values ? (event == kELine || event == kEOutput ? 4 : std::min(4u, std::max(1u, bytes / 4))) : 0;
    for (u32 i = 0; i < words; i++) e.values[i] = values[i];
    keep(e);
  }
  void note_of(u32 event, u32 rank, u32 call, u32 block, u32 more) {
    EventRecord e = {};
    e.event = event;
    e.rank = rank;
    e.call = call;
    e.block = block;
    e.bytes = more;
    keep(e);
  }
  void keep(const EventRecord& e) {  // a ring: the last ones are of interest
    trace_[trace_made_ % trace_room_] = e;
    trace_made_++;
  }

  // ---- a schedule -----------------------------------------------------------------------------------------------------------
  Fiber* new_fiber() {
    if (fibers_used_ == fibers_.size()) {
      Fiber* f = new Fiber();
      f->stack = static_cast<char*>(aligned_alloc(64, kStack));
      stacks_.push_back(f->stack);
      fibers_.push_back(f);
    }
    Fiber* f = fibers_[fibers_used_++];
    f->pending.clear();
    f->seen.clear();
    f->seen_from = f->seen_now = 0;
    f->releases.clear();
    f->polled.clear();
    f->newest.clear();
    f->loads_since_output = f->stale_read = f->votes = f->quiet = false;
    f->polled_owner = 0;
    f->version = ~0u;
    return f;
  }
  Block* new_block() {
    if (blocks_used_ == blocks_.size()) blocks_.push_back(new Block());
    Block* b = blocks_[blocks_used_++];
    b->pool.clear();
    return b;
  }

  void run(u64 seed, Result& total) {
    do {
      grow_ = false;
      run_once(seed);
      if (grow_) {
        capacity_ *= 2;
        for (char* p : arena_chunks_) free(p);
        arena_chunks_.clear();
      }
    } while (grow_);
    total.steps += steps_;
    if (found_ == kNone && pending_ != kNone) {
      found_ = pending_;
      found_result_ = pending_result_;
    }
    if (found_ != kNone) {
      const Result t = total;
      total = found_result_;
      total.schedules = t.schedules;
      total.steps = t.steps;
      total.kind = found_;
    }
  }

  void run_once(u64 seed) {
#if defined(__x86_64__)
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
#endif
    sim = this;
    stamp_++;
    steps_ = 0;
    decision_ = 0;
    trace_made_ = 0;
    found_ = pending_ = kNone;
    ranks_differ_ = false;
    other_rank_ = other_call_ = 0;
    fibers_used_ = blocks_used_ = 0;
    arena_at_ = 0;
    arena_used_ = 0;
    view_pool_.clear();
    agreed_.clear();
    runnable_.clear();
    idle_.assign(setup_.ranks, {});
    std::fill(version_.begin(), version_.end(), 1);
    clock_.assign(slots_, 0);
    free_slots_.clear();
    for (u32 i = slots_; i-- > 0;) free_slots_.push_back(i);
    zero_view_ = zeros();
    order_view_ = zeros();
    random_.s = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
    static const u32 preempt[] = {0, 512, 2048, 8192, 20000}, stale[] = {0, 4096, 16384, 32768},
                     late[] = {0, 8192, 32768}, most[] = {3, 8, 32, 1000};
    preempt_ = preempt[random_.below(5)];
    stale_ = stale[random_.below(4)];
    late_ = late[random_.below(3)];
    preemptions_ = most[random_.below(4)];
    mode_ = exhaustive_ ? 0 : random_.below(3);
    lowest_ = 1000000;
    rank_priority_.clear();
    for (u32 r = 0; r < setup_.ranks; r++) rank_priority_.push_back(1000000 + random_.below(4));
    memory_of_streams_.clear();
    streams_.clear();
    memory_of_streams_.resize(setup_.ranks * streams_per_rank_);
    memory_of_grids_.clear();
    memory_of_grids_.resize(setup_.launches);
    for (u32 i = 0; i < setup_.launches; i++) {
      const Launch& l = setup_.launch[i];
      Stream& s = memory_of_streams_[l.rank * streams_per_rank_ + l.stream];
      Grid& g = memory_of_grids_[i];
      g.launch = &l;
      g.stream = &s;
      g.index = u32(s.grids.size());
      g.blocks_left = g.triggers_left = l.blocks;
      s.rank = l.rank;
      s.grids.push_back(&g);
    }
    for (Stream& s : memory_of_streams_) {
      s.priority = mode_ == 1 ? rank_priority_[s.rank] : mode_ == 2 ? 1000000 + random_.below(1000000) : 0;
      s.view = zeros();
      if (!s.grids.empty()) streams_.push_back(&s);
    }
    unfinished_ = setup_.launches;
    for (u32 d = 0; d < setup_.devices; d++) free_[d] = setup_.capacity[d];
    for (u32 r = 0; r < setup_.ranks; r++) std::fill(array_[r].begin(), array_[r].end(), u8(0xa5));
    self_ = nullptr;
    look_for_launches();
    go_on();  // comes back when a fiber leaves
    self_ = nullptr;
#if defined(__x86_64__)
    _mm_setcsr(saved);
#endif
  }

  static u64 clock_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
  }
  static void sim_load(u64 at, u32 bytes, u32 order, void* value) { sim->load(at, bytes, order, value); }
  static void sim_store(u64 at, u32 bytes, u32 order, const void* value) { sim->store(at, bytes, order, value); }
  static void sim_line(u64 at, u32 mask, const void* value) { sim->store_line(at, mask, value); }
  static u32 sim_modify(u64 at, u32 how, u32 operand) { return sim->modify(at, how, operand); }
  static void sim_fence(u32 sc) { sim->fence(sc); }
  static u32 sim_vote(u32 mask, u32 predicate) { return sim->vote(mask, predicate); }
  static void sim_meet(u32 mask) { sim->meet(mask); }
  static void sim_pause() { sim->pause(); }
  static void sim_wait() { sim->launch_wait(); }
  static void sim_trigger() { sim->trigger(); }

  static constexpr size_t kChunk = 4 << 20;
  Setup setup_;
  Machine machine_;
  Context idle_context_ = {};
  std::vector<std::vector<u32>> id_;
  std::vector<std::vector<u8>> array_;
  std::vector<std::vector<Shadow>> shadow_;
  std::vector<Location> locations_;
  std::vector<u32> version_, free_, free_slots_, rank_priority_;
  std::vector<int> clock_;
  std::vector<std::vector<Fiber*>> idle_;
  std::vector<u64> runnable_;
  std::vector<Stream> memory_of_streams_;
  std::vector<Grid> memory_of_grids_;
  std::vector<Stream*> streams_;
  std::vector<Fiber*> fibers_;
  std::vector<Block*> blocks_;
  std::vector<char*> stacks_, arena_chunks_;
  std::vector<int*> view_pool_;
  std::map<u64, std::vector<u16>> agreed_;
  std::vector<Choice> choices_;
  size_t arena_at_ = 0, arena_used_ = 0, fibers_used_ = 0, blocks_used_ = 0, decision_ = 0;
  u32 streams_per_rank_ = 1, slots_ = 0, capacity_ = 0, stamp_ = 0, unfinished_ = 0;
  u32 preempt_ = 0, preemptions_ = 0, stale_ = 0, late_ = 0, mode_ = 0, lowest_ = 0;
  u32 found_ = 0, pending_ = 0, other_rank_ = 0, other_call_ = 0, trace_room_ = 0, trace_made_ = 0;
  u64 steps_ = 0, at_of_violation_ = 0;
  bool exhaustive_ = false, finished_ = true, grow_ = false, ranks_differ_ = false;
  Random random_ = {};
  Fiber* self_ = nullptr;
  void* main_sp_ = nullptr;
  int *zero_view_ = nullptr, *order_view_ = nullptr;
  EventRecord* trace_ = nullptr;
  Result found_result_ = {}, pending_result_ = {};
};

}  // namespace fc_sim

#define FC_EXPORT extern "C" __attribute__((visibility("default")))
FC_EXPORT void* sim_new(const fc_sim::Setup* s) { return new fc_sim::Sim(*s); }
FC_EXPORT void sim_free(void* s) { delete static_cast<fc_sim::Sim*>(s); }
FC_EXPORT void* sim_machine(void* s) { return static_cast<fc_sim::Sim*>(s)->machine(); }
FC_EXPORT void sim_random(void* s, fc_sim::u64 seed, fc_sim::u64 count, double seconds, fc_sim::EventRecord* events,
                          unsigned room, unsigned* made, fc_sim::Result* result) {
  *result = static_cast<fc_sim::Sim*>(s)->random(seed, count, seconds, events, room, made);
}
FC_EXPORT void sim_exhaust(void* s, unsigned bound, fc_sim::u64 most, int fresh, fc_sim::Result* result) {
  *result = static_cast<fc_sim::Sim*>(s)->exhaust(bound, most, fresh != 0);
}
FC_EXPORT void sim_again(void* s, fc_sim::EventRecord* events, unsigned room, unsigned* made, fc_sim::Result* result) {
  *result = static_cast<fc_sim::Sim*>(s)->again(events, room, made);
}
FC_EXPORT void sim_final_value(void* s, fc_sim::u64 at, unsigned bytes, void* value) {
  static_cast<fc_sim::Sim*>(s)->final_value(at, bytes, static_cast<fc_sim::u8*>(value));
}
// The arrays of a rank as the last schedule left them.
FC_EXPORT const void* sim_array(void* s, unsigned rank) { return static_cast<fc_sim::Sim*>(s)->array_of(rank); }
FC_EXPORT const unsigned sim_sizes[4] = {unsigned(sizeof(fc_sim::Launch)), unsigned(sizeof(fc_sim::Setup)),
                                         unsigned(sizeof(fc_sim::Result)), unsigned(sizeof(fc_sim::EventRecord))};
