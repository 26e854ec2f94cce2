// Runs one call of the kernel in a process: a file holds the `Call`, its pointers being places in that file, and what they
// point to. The file is rewritten with what the kernel wrote.
#include "cpu.cpp"

#include <fstream>
#include <iterator>

namespace {

template <class T>
void place(T*& pointer, char* start) {
  if (pointer) pointer = reinterpret_cast<T*>(start + reinterpret_cast<uintptr_t>(pointer));
}

}  // namespace

int main(int, char** arguments) {
  std::fstream file(arguments[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  char* start = bytes.data();
  Call call;
  std::memcpy(&call, start, sizeof call);
  place(call.query, start); place(call.out, start); place(call.lse, start);
  place(call.pages, start); place(call.records, start);
  place(call.block_ids, start); place(call.first_block, start);
  place(call.q_start, start); place(call.q_len, start); place(call.q_position, start); place(call.kv_len, start);
  if (attend(&call) >= 0) return 1;
  file.clear();
  file.seekp(0);
  file.write(start, std::streamsize(bytes.size()));
  return file.flush() ? 0 : 2;
}
