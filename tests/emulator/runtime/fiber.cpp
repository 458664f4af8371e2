#include "fiber.h"

#include <cstdlib>

#if !defined(__x86_64__)
#error "the emulator switches contexts on x86-64 only"
#endif

// Saves what the System V ABI lets a function expect to survive a call.
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq (%rsi),%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");

namespace emulator {

Fiber* current = nullptr;
Context scheduler;

void prepare(Fiber& fiber, void (*run)()) {
  constexpr int saved_registers = 6;
  uint64_t* top = (uint64_t*)(fiber.stack + stack_bytes);
  *--top = 0;  // a return address that is never used keeps the stack aligned
  *--top = (uint64_t)run;
  for (int i = 0; i < saved_registers; i++) *--top = 0;
  fiber.context.stack_pointer = top;
}

void resume(Fiber& fiber) {
  current = &fiber;
  emulator_switch(&scheduler, &fiber.context);
  current = nullptr;
}

void finish() {
  current->state = State::finished;
  emulator_switch(&current->context, &scheduler);
  abort();
}

void wait(Operation operation, void* place, unsigned fences) {
  current->state = State::waiting;
  current->operation = operation;
  current->place = place;
  current->fences = fences;
  emulator_switch(&current->context, &scheduler);
}

}  // namespace emulator
