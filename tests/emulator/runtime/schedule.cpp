#include "schedule.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sys/mman.h>
#include <vector>

#include "launch.h"
#include "races.h"
#include "report.h"

namespace emulator {

static std::vector<Fiber> fibers;
static std::vector<char> slots[2];
static char* stacks;
static size_t stacks_bytes;
static unsigned char reduction_order[32];

Fiber& fiber(unsigned index) { return fibers[index]; }

void set_up_fibers(unsigned count) {
  fibers.resize(std::max<size_t>(fibers.size(), count));
  for (auto& s : slots) s.resize((fibers.size() + 31) / 32 * 32 * SLOT_BYTES);
  const size_t wanted = (size_t)count * stack_bytes;
  if (wanted > stacks_bytes) {
    if (stacks) munmap(stacks, stacks_bytes);
    stacks_bytes = wanted;
    stacks = (char*)mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (unsigned i = 0; i < count; i++) mprotect(stacks + i * stack_bytes, 4096, PROT_NONE);
  }
  for (unsigned i = 0; i < count; i++) fibers[i].stack = stacks + i * stack_bytes;
}

static unsigned next_random(unsigned& seed) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
template <class T> static void shuffle(T* items, int count, unsigned& seed) {
  for (int i = count - 1; i > 0; i--) std::swap(items[i], items[next_random(seed) % (i + 1)]);
}

static const char* name(Operation operation) {
  return operation == SIMD_OPERATION      ? "simd operation"
         : operation == SIMDGROUP_BARRIER ? "simdgroup_barrier"
                                          : "threadgroup_barrier";
}
// In the name of the thread that waits.
template <class... Arguments> static bool fault_of(Fiber& f, const char* format, Arguments... arguments) {
  current = &f;
  report(f.place, format, arguments...);
  current = nullptr;
  return false;
}

struct Simdgroup {
  unsigned begin, end;

  bool waits_for_simdgroup(const Fiber& f) const {
    return f.state == State::waiting && f.operation != THREADGROUP_BARRIER;
  }

  bool run_ready_threads() {
    for (unsigned i = begin; i < end; i++) {
      if (fibers[i].state != State::ready) continue;
      become(fibers[i]);
      resume(fibers[i]);
      if (failed) return false;
    }
    return true;
  }

  Fiber* first_waiting() {  // in the order of the code, so that branches meet again where they end
    Fiber* first = nullptr;
    for (unsigned i = begin; i < end; i++)
      if (waits_for_simdgroup(fibers[i]) && (!first || fibers[i].place < first->place)) first = &fibers[i];
    return first;
  }
  Fiber* waiting_elsewhere(const Fiber& first) {
    for (unsigned i = begin; i < end; i++)
      if (fibers[i].state == State::waiting && fibers[i].place != first.place) return &fibers[i];
    return nullptr;
  }
  unsigned finished() const {
    return std::count_if(&fibers[begin], &fibers[begin] + (end - begin),
                         [](const Fiber& f) { return f.state == State::finished; });
  }

  bool all_lanes_are_there(Fiber& first) {
    Fiber* elsewhere = waiting_elsewhere(first);
    const unsigned missing = finished();
    statistics.simd_operations++;
    statistics.partial_simd_operations += elsewhere || missing;
    if (elsewhere && options.simd_rule != ANY_LANES)
      return fault_of(
          first,
          "divergence: lane %u waits in a %s while lane %u of its simdgroup waits in a %s elsewhere (%s)",
          first.thread.lane, name(first.operation), elsewhere->thread.lane, name(elsewhere->operation),
          line_of(elsewhere->place).c_str());
    if (missing && options.simd_rule == EVERY_LANE)
      return fault_of(first, "divergence: lane %u waits in a %s that %u lanes of its simdgroup never reach",
                      first.thread.lane, name(first.operation), missing);
    return true;
  }

  void release(const Fiber& first) {
    void* const place = first.place;
    unsigned lanes = 0;
    for (unsigned i = begin; i < end; i++)
      if (waits_for_simdgroup(fibers[i]) && fibers[i].place == place) lanes |= 1u << (i - begin);
    for (unsigned i = begin; i < end; i++) {
      if (!(lanes >> (i - begin) & 1)) continue;
      Fiber& f = fibers[i];
      if (f.operation == SIMDGROUP_BARRIER && f.fences & FENCE_THREADGROUP) f.threadgroup_memory.simdgroup++;
      if (f.operation == SIMDGROUP_BARRIER && f.fences & FENCE_DEVICE) f.device_memory.simdgroup++;
      f.active_lanes = lanes;
      f.state = State::ready;
    }
  }

  // Until every thread has finished or waits for the threadgroup.
  bool run() {
    for (;;) {
      if (!run_ready_threads()) return false;
      Fiber* first = first_waiting();
      if (!first) return true;
      if (!all_lanes_are_there(*first)) return false;
      release(*first);
    }
  }
};

static bool pass_barrier(unsigned threads) {
  Fiber* first = nullptr;
  unsigned waiting = 0;
  for (unsigned i = 0; i < threads; i++) {
    if (fibers[i].state == State::finished) continue;
    waiting++;
    if (!first) first = &fibers[i];
  }
  if (waiting < threads)
    return fault_of(*first,
                    "divergence: %u threads wait in a threadgroup_barrier that %u threads never reach",
                    waiting, threads - waiting);
  for (unsigned i = 0; i < threads; i++)
    if (fibers[i].place != first->place)
      return fault_of(*first, "divergence: thread %u waits in one %s, thread %u in another %s (%s)",
                      first->thread.index_in_threadgroup, name(THREADGROUP_BARRIER), i,
                      name(THREADGROUP_BARRIER), line_of(fibers[i].place).c_str());
  statistics.barriers++;
  for (unsigned i = 0; i < threads; i++) {
    Fiber& f = fibers[i];
    if (f.fences & FENCE_THREADGROUP) f.threadgroup_memory = {f.threadgroup_memory.threadgroup + 1, 0};
    if (f.fences & FENCE_DEVICE) f.device_memory = {f.device_memory.threadgroup + 1, 0};
    f.state = State::ready;
  }
  return true;
}

bool run_threadgroup(unsigned threads, unsigned seed) {
  std::vector<Simdgroup> simdgroups;
  for (unsigned begin = 0; begin < threads; begin += 32)
    simdgroups.push_back({begin, std::min(begin + 32, threads)});
  std::iota(reduction_order, reduction_order + 32, 0);
  for (;;) {
    if (options.shuffle_order) {
      shuffle(simdgroups.data(), simdgroups.size(), seed);
      shuffle(reduction_order, 32, seed);
    }
    for (Simdgroup& s : simdgroups)
      if (!s.run()) return false;
    const bool all_finished = std::all_of(&fibers[0], &fibers[0] + threads,
                                          [](const Fiber& f) { return f.state == State::finished; });
    if (all_finished) return true;
    if (!pass_barrier(threads)) return false;
  }
}

}  // namespace emulator

using namespace emulator;
extern "C" {

const char* emu_exchange(const void* value, unsigned bytes) {
  Fiber& f = *current;
  // Two sets of slots by turns: a fast lane's next value must not overwrite one that a slow lane has yet to
  // read.
  f.exchange_parity ^= 1;
  char* const all = slots[f.exchange_parity].data();
  memcpy(all + (size_t)f.thread.index_in_threadgroup * SLOT_BYTES, value, bytes);
  settle_pending_write();
  wait(SIMD_OPERATION, __builtin_return_address(0), 0);
  return all + (size_t)f.thread.simdgroup * 32 * SLOT_BYTES;
}
void emu_barrier(int operation, unsigned fences) {
  settle_pending_write();
  wait((Operation)operation, __builtin_return_address(0), fences);
}
unsigned emu_active_lanes() { return current->active_lanes; }
unsigned emu_lane() { return current->thread.lane; }
const unsigned char* emu_reduction_order() { return reduction_order; }
void emu_fail(const char* message) {
  report(__builtin_return_address(0), "%s", message);
  finish();
}
}
