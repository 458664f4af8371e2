// One thread per 16 bytes of a row of the result, which is row order[row] of `first` followed by `last`.

constexpr int PARTS = ROW_BYTES / 16;
const int part = int(thread_position_in_grid.x);
const int row = int(thread_position_in_grid.y);
if (part < PARTS) {
  const int from = order[row], firsts = int(first_shape[0]);
  device char* to = (device char*)out + (size_t(row) * PARTS + part) * 16;
  if (from < firsts) {
    copy_16_bytes(to, (const device char*)first + (size_t(from) * PARTS + part) * 16);
  } else {
    copy_16_bytes(to, (const device char*)last + (size_t(from - firsts) * PARTS + part) * 16);
  }
}
