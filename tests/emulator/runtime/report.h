// The first fault of a launch, in words.
#pragma once
#include <string>

#include "fiber.h"

namespace emulator {

extern bool failed;
extern std::string fault;

void clear_report(void* module_base);
// `place` is an address in the kernel's code; the text names it as an offset that the caller turns into a
// line.
void report(void* place, const char* format, ...);
std::string line_of(void* place);

}  // namespace emulator
