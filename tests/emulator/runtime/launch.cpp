// One dispatch of a compiled kernel over a grid.
#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <vector>
#include <xmmintrin.h>

#include "memory.h"
#include "races.h"
#include "report.h"
#include "schedule.h"
#include "watchdog.h"

namespace emulator {

typedef void (*Kernel)(void** buffers, const GpuThread* thread);

Options options;
Statistics statistics;
static Kernel kernel;
static void** kernel_buffers;

static void run_thread() {
  kernel(kernel_buffers, &current->thread);
  settle_pending_write();
  finish();
}

static int find_module(dl_phdr_info* info, size_t, void* wanted) {
  auto for_each_segment = [&](auto action) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const auto& header = info->dlpi_phdr[i];
      const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
      if (header.p_type == PT_LOAD) action(begin, begin + header.p_memsz);
    }
  };
  bool found = false;
  for_each_segment([&](uintptr_t begin, uintptr_t end) {
    found |= begin <= (uintptr_t)wanted && (uintptr_t)wanted < end;
  });
  if (!found) return 0;
  forget_module();
  for_each_segment(add_module_segment);
  clear_report((void*)info->dlpi_addr);
  return 1;
}

struct Grid {
  unsigned threads[3], threadgroup[3], threadgroups[3];
  unsigned threads_per_threadgroup() const { return threadgroup[0] * threadgroup[1] * threadgroup[2]; }
};

static unsigned place_threads(const Grid& grid, const unsigned (&position)[3]) {
  unsigned size[3];
  for (int k = 0; k < 3; k++)
    size[k] = std::min(grid.threadgroup[k], grid.threads[k] - position[k] * grid.threadgroup[k]);
  const unsigned count = size[0] * size[1] * size[2];
  for (unsigned i = 0; i < count; i++) {
    Fiber& f = fiber(i);
    GpuThread& t = f.thread;
    const unsigned local[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    for (int k = 0; k < 3; k++) {
      t.position_in_threadgroup[k] = local[k];
      t.threadgroup_position[k] = position[k];
      t.position_in_grid[k] = position[k] * grid.threadgroup[k] + local[k];
      t.threads_per_threadgroup[k] = size[k];
      t.dispatched_threads_per_threadgroup[k] = grid.threadgroup[k];
      t.threads_per_grid[k] = grid.threads[k];
      t.threadgroups_per_grid[k] = grid.threadgroups[k];
    }
    t.index_in_threadgroup = i;
    t.lane = i % 32;
    t.simdgroup = i / 32;
    t.simdgroups = (count + 31) / 32;
    t.dispatched_simdgroups = (grid.threads_per_threadgroup() + 31) / 32;
    f.state = State::ready;
    f.exchange_parity = 0;
    f.threadgroup_memory = f.device_memory = {0, 0};
    prepare(f, run_thread);
  }
  statistics.threads += count;
  return count;
}

static void run_grid(const Grid& grid) {
  set_up_fibers(grid.threads_per_threadgroup());
  set_threadgroup_size(grid.threads_per_threadgroup());
  forget_pending_write();
  unsigned seed = options.shuffle_order * 7919u;
  for (unsigned z = 0; z < grid.threadgroups[2]; z++)
    for (unsigned y = 0; y < grid.threadgroups[1]; y++)
      for (unsigned x = 0; x < grid.threadgroups[0]; x++) {
        forget_threadgroup_memory();
        const unsigned count = place_threads(grid, {x, y, z});
        if (!run_threadgroup(count, seed += 31)) return;
      }
}

// The processor's flush-to-zero and denormals-are-zero bits, for the time of a launch.
struct FlushSubnormals {
  unsigned saved = _mm_getcsr();
  explicit FlushSubnormals(bool flush) {
    if (flush) _mm_setcsr(saved | 0x8040);
  }
  ~FlushSubnormals() { _mm_setcsr(saved); }
};

}  // namespace emulator

using namespace emulator;
extern "C" {

// A fast-math result: wrong by up to the chosen number of units in the last place, by a hash of the value.
float emu_inexact(float exact) {
  if (!options.fast_math_ulps || !__builtin_isnormal(exact)) return exact;
  uint32_t bits;
  memcpy(&bits, &exact, sizeof bits);
  const uint32_t hash = (bits * 2654435761u) >> 16;
  bits += (int)(hash % (2 * options.fast_math_ulps + 1)) - options.fast_math_ulps;
  memcpy(&exact, &bits, sizeof bits);
  return exact;
}

// `grid` counts threads. Returns 0, or 1 with a message in `error`.
int emulator_launch(void* entry, const BufferDescription* buffers, int buffer_count, const unsigned* grid,
                    const unsigned* threadgroup, const Options* with, char* error, size_t error_bytes,
                    Statistics* counted) {
  options = *with;
  statistics = {};
  kernel = (Kernel)entry;
  Grid g;
  for (int k = 0; k < 3; k++) {
    g.threads[k] = grid[k];
    g.threadgroup[k] = std::min(threadgroup[k], grid[k]);
    g.threadgroups[k] = g.threadgroup[k] ? (grid[k] + g.threadgroup[k] - 1) / g.threadgroup[k] : 0;
  }
  const unsigned threads = g.threads_per_threadgroup();
  const char* refusal = nullptr;
  if (!threads) refusal = "empty grid or threadgroup";
  if (threads > 1024) refusal = "a threadgroup has at most 1024 threads";
  if (refusal || !reserve_address_space(&refusal)) {
    snprintf(error, error_bytes, "%s", refusal);
    return 1;
  }
  dl_iterate_phdr(find_module, entry);
  std::vector<Region*> regions;
  std::vector<void*> addresses;
  for (int i = 0; i < buffer_count; i++) {
    regions.push_back(add_buffer(buffers[i]));
    if (!regions.back())
      report(nullptr, "no room for buffer '%s' of %lu bytes", buffers[i].name, buffers[i].bytes);
    addresses.push_back(regions.back() ? (void*)regions.back()->begin : nullptr);
  }
  kernel_buffers = addresses.data();
  if (!failed) {
    Watchdog watchdog(options.seconds);
    FlushSubnormals flush(options.flush_subnormals);
    run_grid(g);
  }
  for (int i = 0; i < buffer_count && !failed; i++) copy_back(*regions[i], buffers[i]);
  release_regions();
  snprintf(error, error_bytes, "%s", failed ? fault.c_str() : "");
  *counted = statistics;
  return failed;
}
}
