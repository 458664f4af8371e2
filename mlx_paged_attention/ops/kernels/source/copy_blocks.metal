// One thread per 16 bytes of a block: block source[i] to block target[i], keys and values, in place.

const int at = int(thread_position_in_grid.x);
const int i = int(thread_position_in_grid.y);
const size_t from = source[i], to = target[i];
if (at < KEY_BYTES / 16) {
  copy_16_bytes((device char*)k_pool + to * KEY_BYTES + at * 16, (const device char*)k_pool + from * KEY_BYTES + at * 16);
}
if (at < VALUE_BYTES / 16) {
  copy_16_bytes((device char*)v_pool + to * VALUE_BYTES + at * 16, (const device char*)v_pool + from * VALUE_BYTES + at * 16);
}
if (at == 0 && i == 0) done[0] = 0.0f;
