#include "lib/output/small_write_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

namespace reshard::small_write_buffer_test {
namespace {

// The disk's content, and the number of calls.
struct Disk {
  std::map<std::uint32_t, std::string> files;
  int calls = 0;
  Status write(std::uint32_t file, Index offset, Bytes bytes) {
    ++calls;
    std::string& to = files[file];
    to.resize(std::max(to.size(), static_cast<std::size_t>(offset) + bytes.size()), '.');
    to.replace(static_cast<std::size_t>(offset), bytes.size(), as_string(bytes));
    return {};
  }
  EmitBytes emit() {
    return [this](std::uint32_t f, Index offset, Bytes bytes) { return write(f, offset, bytes); };
  }
};

struct Write {
  std::uint32_t file;
  Index offset;
  std::string bytes;
};

// Three files in which headers and payloads alternate; some payloads are long, and some ranges are empty.
struct Made {
  std::vector<Write> headers, payloads;
};
Made make(std::mt19937& random) {
  Made out;
  for (std::uint32_t file = 0; file < 3; ++file) {
    Index at = 0;
    for (int i = 0; i < 300; ++i) {
      const auto some = [&](std::size_t most) {
        return std::string(random() % most, static_cast<char>('a' + random() % 26));
      };
      out.headers.push_back({file, at, some(3) + some(200)});
      at += std::ssize(out.headers.back().bytes);
      if (random() % 5 == 0) at += static_cast<Index>(random() % 70000);
      out.payloads.push_back({file, at, random() % 20 == 0 ? some(70000) : some(65)});
      at += std::ssize(out.payloads.back().bytes);
    }
  }
  return out;
}

TEST(SmallWriteBuffer, LeaveTheSameBytesInFewerCalls) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    Made made = make(random);
    Disk plain, joined;
    for (const auto* const list : {&made.payloads, &made.headers})
      for (const Write& w : *list) EXPECT_TRUE(plain.write(w.file, w.offset, as_bytes(w.bytes)));

    std::shuffle(made.payloads.begin(), made.payloads.end(), random);
    // Files are sealed in any order, and headers within a file may arrive late.
    if (round % 2 == 1) std::shuffle(made.headers.begin(), made.headers.end(), random);
    SmallWriteBuffer held;
    for (const Write& w : made.payloads)
      EXPECT_TRUE(held.add(w.file, w.offset, as_bytes(w.bytes)) || joined.write(w.file, w.offset, as_bytes(w.bytes)));
    JoinedWrites together(joined.emit());
    const EmitBytes emit = [&](std::uint32_t f, Index offset, Bytes bytes) { return together.add(f, offset, bytes); };
    for (const Write& w : made.headers) {
      EXPECT_TRUE(held.give_before(w.file, w.offset, emit));
      EXPECT_TRUE(emit(w.file, w.offset, as_bytes(w.bytes)));
    }
    EXPECT_TRUE(held.give_all(emit));
    EXPECT_TRUE(together.finish());
    EXPECT_EQ(joined.files, plain.files) << round;
    EXPECT_LT(joined.calls, round % 2 == 0 ? plain.calls / 3 : plain.calls);
  }
}

TEST(SmallWriteBuffer, TakeWhatIsShortWhileThereIsRoom) {
  SmallWriteBuffer held;
  const std::string longest(SmallWriteBuffer::kLongest, 'x');
  EXPECT_FALSE(held.add(0, 0, as_bytes(longest + "x")));
  Index n = 0;
  while (held.add(0, n * 100, as_bytes(longest))) ++n;
  EXPECT_EQ(n, SmallWriteBuffer::kMemory / SmallWriteBuffer::bytes_of(SmallWriteBuffer::kLongest));
  Index given = 0;
  EXPECT_TRUE(held.give_all([&](std::uint32_t, Index offset, Bytes bytes) -> Status {
    EXPECT_EQ(offset, 100 * given++);
    EXPECT_EQ(as_string(bytes), longest);
    return {};
  }));
  EXPECT_EQ(given, n);
}

TEST(SmallWriteBuffer, HandOnAnError) {
  SmallWriteBuffer held;
  EXPECT_TRUE(held.add(0, 8, as_bytes("abc")));
  const Status refused = held.give_all([](std::uint32_t, Index, Bytes) -> Status { return io_error("disk full"); });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message(), "disk full");
}

}  // namespace
}  // namespace reshard::small_write_buffer_test
