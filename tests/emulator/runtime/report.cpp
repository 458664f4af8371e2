#include "report.h"

#include <cstdarg>
#include <cstdio>

namespace emulator {

bool failed;
std::string fault;
static uintptr_t module_base;

void clear_report(void* base) {
  failed = false;
  fault.clear();
  module_base = (uintptr_t)base;
}

std::string line_of(void* place) {
  char text[32];
  snprintf(text, sizeof text, "pc=+0x%lx", (unsigned long)((uintptr_t)place - module_base - 1));
  return text;
}

void report(void* place, const char* format, ...) {
  if (failed) return;
  failed = true;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fault = text;
  if (current) {
    const GpuThread& t = current->thread;
    const unsigned *p = t.position_in_threadgroup, *g = t.threadgroup_position;
    snprintf(text, sizeof text, "\n  thread (%u,%u,%u) of threadgroup (%u,%u,%u), simdgroup %u lane %u", p[0],
             p[1], p[2], g[0], g[1], g[2], t.simdgroup, t.lane);
    fault += text;
  }
  if (place) fault += "\n  " + line_of(place);
}

}  // namespace emulator
