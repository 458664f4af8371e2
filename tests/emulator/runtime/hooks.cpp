// The functions that clang's instrumentation calls: its thread sanitizer's and undefined-behaviour
// sanitizer's names, with our meaning. The sanitizers' own runtimes are never linked.
#include <cstdio>
#include <cstring>

#include "memory.h"
#include "report.h"

using namespace emulator;

#define PLACE __builtin_return_address(0)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

#define ACCESS(SIZE)                                                                     \
  void __tsan_read##SIZE(void* p) { touch((uintptr_t)p, SIZE, false, PLACE); }           \
  void __tsan_write##SIZE(void* p) { touch((uintptr_t)p, SIZE, true, PLACE); }           \
  void __tsan_unaligned_read##SIZE(void* p) { touch((uintptr_t)p, SIZE, false, PLACE); } \
  void __tsan_unaligned_write##SIZE(void* p) { touch((uintptr_t)p, SIZE, true, PLACE); } \
  void __tsan_read_write##SIZE(void* p) {                                                \
    touch((uintptr_t)p, SIZE, false, PLACE);                                             \
    touch((uintptr_t)p, SIZE, true, PLACE);                                              \
  }                                                                                      \
  void __tsan_unaligned_read_write##SIZE(void* p) {                                      \
    touch((uintptr_t)p, SIZE, false, PLACE);                                             \
    touch((uintptr_t)p, SIZE, true, PLACE);                                              \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void* p, size_t n) { touch((uintptr_t)p, n, false, PLACE); }
void __tsan_write_range(void* p, size_t n) { touch((uintptr_t)p, n, true, PLACE); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  touch((uintptr_t)from, n, false, PLACE);
  touch((uintptr_t)to, n, true, PLACE);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  touch((uintptr_t)from, n, false, PLACE);
  touch((uintptr_t)to, n, true, PLACE);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  touch((uintptr_t)to, n, true, PLACE);
  return memset(to, value, n);
}

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeMismatch {
  SourceLocation location;
  void* type;
  uint8_t log_alignment, kind;
};

static void undefined(const char* what, const void* data) {
  const SourceLocation* l = (const SourceLocation*)data;
  report(nullptr, "%s at %s:%u:%u", what, l->file ? l->file : "?", l->line, l->column);
  if (current) finish();
}

#define UNDEFINED(name, what) \
  void __ubsan_handle_##name(void* data) { undefined(what, data); }
UNDEFINED(shift_out_of_bounds, "shift out of bounds")
UNDEFINED(divrem_overflow, "division by zero or overflow")
UNDEFINED(add_overflow, "signed integer overflow in an addition")
UNDEFINED(sub_overflow, "signed integer overflow in a subtraction")
UNDEFINED(mul_overflow, "signed integer overflow in a multiplication")
UNDEFINED(negate_overflow, "signed integer overflow in a negation")

void __ubsan_handle_out_of_bounds(void* data, uintptr_t index) {
  char what[96];
  snprintf(what, sizeof what, "index %ld out of bounds of a fixed-size array", (long)index);
  undefined(what, data);
}
void __ubsan_handle_type_mismatch_v1(void* data, uintptr_t pointer) {
  char what[96] = "access through a null pointer";
  if (pointer)
    snprintf(what, sizeof what, "misaligned address (needs %u bytes, ends in %02lx)",
             1u << ((TypeMismatch*)data)->log_alignment, (unsigned long)(pointer & 0xff));
  undefined(what, data);
}
}
