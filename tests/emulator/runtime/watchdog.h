// Ends a launch that runs for too long. It interrupts the thread that loops, so the report says where.
#pragma once

namespace emulator {

struct Watchdog {
  explicit Watchdog(long seconds);
  ~Watchdog();
};

}  // namespace emulator
