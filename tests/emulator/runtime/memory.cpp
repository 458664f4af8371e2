// The address space: slots, buffers, threadgroup variables, and the check of each access's bounds.
#include "memory.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "abi.h"
#include "races.h"
#include "report.h"

namespace emulator {

static uintptr_t arena;
static Region regions[slot_count];
static int region_count;
struct ThreadgroupVariable {
  int id;
  Region* region;
  bool zeroed;
};
static ThreadgroupVariable variables[slot_count];
static int variable_count;

static const char* const not_reserved = "cannot reserve address space for the emulator's buffers";

static void* map(uintptr_t at, size_t bytes, int protection, int flags, int file = -1) {
  return mmap((void*)at, bytes, protection, flags | MAP_NORESERVE | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
}
template <class T> static T* zeros(size_t count) {
  void* p = map(0, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE);
  return p == MAP_FAILED ? nullptr : (T*)p;
}
template <class T> static void free_zeros(T* p, size_t count) {
  if (p) munmap(p, count * sizeof(T));
}

bool reserve_address_space(const char** error) {
  if (arena) return true;
  void* p = map(0, (size_t)slot_count << slot_shift, PROT_NONE, MAP_PRIVATE);
  if (p == MAP_FAILED) {
    *error = not_reserved;
    return false;
  }
  arena = (uintptr_t)p;
  return true;
}

static Region* add_region(size_t bytes, int file, unsigned granule, const char* name) {
  if (region_count == slot_count || bytes > slot_margin) return nullptr;
  const uintptr_t begin = arena + ((uintptr_t)region_count << slot_shift) + slot_margin;
  const int sharing = file < 0 ? MAP_PRIVATE : MAP_SHARED;
  if (bytes && map(begin, bytes, PROT_READ | PROT_WRITE, sharing | MAP_FIXED, file) == MAP_FAILED)
    return nullptr;
  Region& region = regions[region_count++];
  region = Region{};
  region.begin = begin;
  region.end = begin + bytes;
  region.granule = granule;
  region.name = name;
  return &region;
}
static bool track(Region& region) {
  region.tracked = true;
  region.history = zeros<LastAccess>(region.granules());
  region.initialised = zeros<uint64_t>(region.granules() / 64 + 1);
  return region.history && region.initialised;
}

Region* add_buffer(const BufferDescription& buffer) {
  Region* region = add_region(buffer.bytes, buffer.file, buffer.element_bytes, buffer.name);
  if (!region) return nullptr;
  region->writable = buffer.writable;
  if (buffer.file < 0) memcpy((void*)region->begin, buffer.data, buffer.bytes);
  if (buffer.writable && !track(*region)) return nullptr;
  region->tracks_initialisation = !buffer.initialised;
  return region;
}
void copy_back(const Region& region, const BufferDescription& buffer) {
  if (buffer.writable && buffer.file < 0) memcpy(buffer.data, (void*)region.begin, buffer.bytes);
}
void release_regions() {
  for (int i = 0; i < region_count; i++) {
    Region& region = regions[i];
    if (region.bytes()) map(region.begin, region.bytes(), PROT_NONE, MAP_PRIVATE | MAP_FIXED);
    if (!region.tracked) continue;
    free_zeros(region.history, region.granules());
    free_zeros(region.initialised, region.granules() / 64 + 1);
  }
  region_count = variable_count = 0;
}

void forget_threadgroup_memory() {
  for (int i = 0; i < variable_count; i++) {
    Region& region = *variables[i].region;
    variables[i].zeroed = false;
    memset((void*)region.begin, 0xff, region.bytes());  // NaN in every floating-point type
    memset(region.history, 0, region.granules() * sizeof(LastAccess));
    memset(region.initialised, 0, (region.granules() / 64 + 1) * sizeof(uint64_t));
  }
}

static ThreadgroupVariable* variable(int id) {
  for (int i = 0; i < variable_count; i++)
    if (variables[i].id == id) return &variables[i];
  return nullptr;
}
static void add_threadgroup_variable(int id, size_t bytes, size_t alignment, const char* name, void* place) {
  statistics.threadgroup_bytes =
      (statistics.threadgroup_bytes + alignment - 1) / alignment * alignment + bytes;
  if (statistics.threadgroup_bytes > options.threadgroup_memory_limit) {
    report(place, "threadgroup memory of %ld bytes exceeds the limit of %ld", statistics.threadgroup_bytes,
           options.threadgroup_memory_limit);
    finish();
  }
  Region* region = add_region(bytes, -1, 1, name);
  if (!region || !track(*region)) {
    report(place, "%s", not_reserved);
    finish();
  }
  region->writable = region->shared_by_threadgroup = region->tracks_initialisation = true;
  memset((void*)region->begin, 0xff, bytes);
  variables[variable_count++] = {id, region, false};
}

// ---- one access
// ------------------------------------------------------------------------------------------------

void* last_place;
static struct {
  uintptr_t begin, end;
} module_segments[64];
static int module_segment_count;

void forget_module() { module_segment_count = 0; }
void add_module_segment(uintptr_t begin, uintptr_t end) {
  if (module_segment_count < 64) module_segments[module_segment_count++] = {begin, end};
}
bool is_part_of_the_kernel(uintptr_t address, unsigned bytes) {
  for (int i = 0; i < module_segment_count; i++)
    if (address >= module_segments[i].begin && address + bytes <= module_segments[i].end) return true;
  return false;
}

[[noreturn]] static void out_of_bounds(const Region* region, uintptr_t address, unsigned bytes, bool writes,
                                       void* place) {
  const char* access = writes ? "write" : "read";
  if (address < 4096)
    report(place, "%s of %u bytes through a null pointer (offset %lu)", access, bytes,
           (unsigned long)address);
  else if (!region)
    report(place, "out-of-bounds %s of %u bytes, far from any buffer", access, bytes);
  else if (address < region->begin)
    report(place, "out-of-bounds %s of %u bytes, %lu bytes before '%s' (%lu bytes)", access, bytes,
           (unsigned long)(region->begin - address), region->name, region->bytes());
  else
    report(place, "out-of-bounds %s of %u bytes, %lu bytes past the end of '%s' (%lu bytes)", access, bytes,
           (unsigned long)(address - region->end), region->name, region->bytes());
  finish();
}

void touch(uintptr_t address, unsigned bytes, bool writes, void* place, bool atomic) {
  if (!current || !bytes) return;
  statistics.memory_accesses++;
  settle_pending_write();
  if (address - (uintptr_t)current->stack < (uintptr_t)stack_bytes) return;
  last_place = place;
  const uintptr_t slot = (address - arena) >> slot_shift;
  Region* region = slot < (uintptr_t)region_count ? &regions[slot] : nullptr;
  if (!region && !writes && is_part_of_the_kernel(address, bytes)) return;
  if (!region || address < region->begin) out_of_bounds(region, address, bytes, writes, place);
  if (address + bytes > region->end)
    out_of_bounds(region, address < region->end ? region->end : address, bytes, writes, place);
  if (writes && !region->writable) {
    report(place, "write to input '%s' at byte %lu, which is not declared mutable", region->name,
           (unsigned long)(address - region->begin));
    finish();
  }
  if (region->tracked) check_history(*region, address, bytes, writes, atomic, place);
  if (failed) finish();
}

}  // namespace emulator

using namespace emulator;
extern "C" {

void* emu_threadgroup_variable(int id, unsigned long bytes, unsigned long alignment, const char* name) {
  if (!variable(id)) add_threadgroup_variable(id, bytes, alignment, name, __builtin_return_address(0));
  return (void*)variable(id)->region->begin;
}

// `= {}`: once a threadgroup, before any of its threads gets further.
void emu_threadgroup_zero(int id) {
  ThreadgroupVariable& v = *variable(id);
  if (v.zeroed) return;
  v.zeroed = true;
  memset((void*)v.region->begin, 0, v.region->bytes());
  memset(v.region->initialised, 0xff, (v.region->granules() / 64 + 1) * sizeof(uint64_t));
}

void* emu_threadgroup_argument(int index) {
  static const char* const names[4] = {"threadgroup(0)", "threadgroup(1)", "threadgroup(2)",
                                       "threadgroup(3)"};
  if (index < 0 || index > 3 || !options.threadgroup_argument_bytes[index]) {
    report(nullptr, "threadgroup argument %d has no size", index);
    finish();
  }
  return emu_threadgroup_variable(-1 - index, options.threadgroup_argument_bytes[index], 16, names[index]);
}

void emu_atomic_access(const void* address, unsigned bytes, int is_write) {
  touch((uintptr_t)address, bytes, is_write, __builtin_return_address(0), true);
}
}
