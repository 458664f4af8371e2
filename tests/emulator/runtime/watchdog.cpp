#include "watchdog.h"

#include <csignal>
#include <ctime>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "memory.h"
#include "report.h"

namespace emulator {

static timer_t timer;
static struct sigaction previous;
static long limit;

static bool runs_on_fiber_stack() {
  char here;
  return current && (uintptr_t)&here - (uintptr_t)current->stack < (uintptr_t)stack_bytes;
}

static void on_expiry(int, siginfo_t*, void* context) {
  if (failed || !runs_on_fiber_stack()) return;  // the next tick may find it
  char* const instruction = (char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
  const bool in_kernel = is_part_of_the_kernel((uintptr_t)instruction, 1);
  report(in_kernel ? instruction + 1 : last_place, "still running after %ld seconds: an endless loop?",
         limit);
  finish();
}

Watchdog::Watchdog(long seconds) {
  limit = seconds;
  struct sigaction action = {};
  action.sa_sigaction = on_expiry;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
  sigaction(SIGRTMIN + 3, &action, &previous);
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGRTMIN + 3;
  event._sigev_un._tid = syscall(SYS_gettid);
  timer_create(CLOCK_MONOTONIC, &event, &timer);
  const timespec tick = {0, 10 * 1000 * 1000};
  const itimerspec times = {tick, {seconds, 0}};
  timer_settime(timer, 0, &times, nullptr);
}
Watchdog::~Watchdog() {
  timer_delete(timer);
  sigaction(SIGRTMIN + 3, &previous, nullptr);
}

}  // namespace emulator
