#include "races.h"

#include <cstring>

#include "report.h"

namespace emulator {

// A thread's identity is its index in the grid plus one; readers without order between them share one history
// entry, which then carries one of these marks.
constexpr uint32_t several_of_a_simdgroup = 1u << 30, several = 1u << 31;
constexpr uint32_t identity_bits = several_of_a_simdgroup - 1;
constexpr uint32_t atomic_epoch = ~0u;

static unsigned threadgroup_size;
static uint32_t me;

static struct {
  bool exists;
  uintptr_t address;
  unsigned bytes;
  char before[16];
  const Region* region;
  uint32_t earlier_writer;
  void* place;
} pending;

void set_threadgroup_size(unsigned threads) { threadgroup_size = threads; }

void become(const Fiber& fiber) {
  const GpuThread& t = fiber.thread;
  const unsigned *g = t.threadgroup_position, *n = t.threadgroups_per_grid;
  const uint32_t threadgroup = (g[2] * n[1] + g[1]) * n[0] + g[0];
  me = (threadgroup * threadgroup_size + t.index_in_threadgroup) % (identity_bits - 1) + 1;
}

static unsigned threadgroup_of(uint32_t identity) {
  return ((identity & identity_bits) - 1) / threadgroup_size;
}
static unsigned index_of(uint32_t identity) { return ((identity & identity_bits) - 1) % threadgroup_size; }
static bool same_simdgroup(uint32_t a, uint32_t b) {
  return threadgroup_of(a) == threadgroup_of(b) && index_of(a) / 32 == index_of(b) / 32;
}

static bool ordered_before_me(const Region& region, uint32_t other, uint32_t epoch, uint32_t my_epoch) {
  if (!other || other == me) return true;
  if (!region.shared_by_threadgroup && threadgroup_of(other) != threadgroup_of(me)) return false;
  if (epoch >> 12 != my_epoch >> 12) return true;  // a threadgroup barrier between
  if (other & several || !same_simdgroup(other, me)) return false;
  return epoch != my_epoch;  // a simdgroup barrier between
}

static void report_race(const Region& region, uintptr_t address, const char* what, uint32_t other,
                        void* place) {
  report(place,
         "data race on %s '%s' at byte %lu: %s; the other access is by thread %u of threadgroup #%u%s, with "
         "no barrier between",
         region.shared_by_threadgroup ? "threadgroup memory" : "buffer", region.name,
         (unsigned long)(address - region.begin), what, index_of(other), threadgroup_of(other),
         other & (several | several_of_a_simdgroup) ? " (and others)" : "");
}

static void remember_write(const Region& region, uintptr_t address, unsigned bytes, uint32_t earlier,
                           void* place) {
  if (pending.exists) return;
  pending = {true, address, bytes, {}, &region, earlier, place};
  memcpy(pending.before, (void*)address, bytes);
}
void forget_pending_write() { pending.exists = false; }
void settle_pending_write() {
  if (__builtin_expect(!pending.exists, 1)) return;
  pending.exists = false;
  if (memcmp((void*)pending.address, pending.before, pending.bytes) == 0) {
    statistics.writes_of_the_same_value++;
    return;
  }
  report_race(*pending.region, pending.address, "write after write, of another value", pending.earlier_writer,
              pending.place);
  finish();
}

static void add_reader(const Region& region, LastAccess& last, uint32_t epoch) {
  if (ordered_before_me(region, last.reader, last.read_epoch, epoch)) {
    last.reader = me;
  } else if ((last.reader & identity_bits) != me || last.reader != (last.reader & identity_bits)) {
    const bool one_simdgroup =
        same_simdgroup(last.reader, me) && !(last.reader & several) && last.read_epoch == epoch;
    last.reader = me | (one_simdgroup ? several_of_a_simdgroup : several);
  }
  last.read_epoch = epoch;
}

static bool initialise(Region& region, size_t granule, bool writes) {
  const uint64_t bit = 1ull << (granule & 63);
  uint64_t& word = region.initialised[granule >> 6];
  if (writes) word |= bit;
  return word & bit;
}

void check_history(Region& region, uintptr_t address, unsigned bytes, bool writes, bool atomic, void* place) {
  const uint32_t epoch =
      (region.shared_by_threadgroup ? current->threadgroup_memory : current->device_memory).packed();
  const size_t first = (address - region.begin) / region.granule;
  const size_t last_granule = (address + bytes - 1 - region.begin) / region.granule;
  for (size_t i = first; i <= last_granule; i++) {
    if (region.tracks_initialisation && !initialise(region, i, writes)) {
      report(place, "read of uninitialised %s '%s' at byte %lu",
             region.shared_by_threadgroup ? "threadgroup memory" : "output", region.name,
             (unsigned long)(address - region.begin));
      return;
    }
    LastAccess& last = region.history[i];
    const bool after_write =
        last.write_epoch == atomic_epoch || ordered_before_me(region, last.writer, last.write_epoch, epoch);
    if (atomic) {
      if (!after_write) return report_race(region, address, "atomic after plain write", last.writer, place);
      last.writer = me;
      last.write_epoch = atomic_epoch;
      continue;
    }
    if (!after_write) {
      if (!writes || bytes > sizeof pending.before)
        return report_race(region, address, writes ? "write after write" : "read after write", last.writer,
                           place);
      remember_write(region, address, bytes, last.writer, place);
    }
    if (!writes) {
      add_reader(region, last, epoch);
      continue;
    }
    if (!ordered_before_me(region, last.reader, last.read_epoch, epoch))
      return report_race(region, address, "write after read", last.reader, place);
    last = {me, epoch, 0, 0};
  }
}

}  // namespace emulator
