#include "lib/base/cursor.h"

#include <gtest/gtest.h>

namespace reshard::cursor_test {
namespace {

using namespace std::string_view_literals;

TEST(Cursor, ReadsLittleEndianIntegers) {
  Cursor c(as_bytes("\x01\x02\x00\x03\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\x7f"sv), "f");
  EXPECT_EQ(*c.read<std::uint8_t>("a"), 1);
  EXPECT_EQ(*c.read<std::uint16_t>("b"), 2);
  EXPECT_EQ(*c.read<std::uint32_t>("c"), 3U);
  EXPECT_EQ(*c.read<std::int64_t>("d"), INT64_MAX);
  EXPECT_TRUE(c.done());
}

TEST(Cursor, AShortReadNamesThePlaceTheThingAndBothLengths) {
  Cursor c(as_bytes("0123456789ab"), "dir/file", 0x1000);
  ASSERT_TRUE(c.skip(2, "magic"));
  const auto r = c.take(46, "central directory entry");
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(r.error().message(), "dir/file@0x1002: central directory entry: expected 46 bytes, got 10 before the end");
  EXPECT_EQ(c.position(), 2) << "a refused read moves nothing";
}

TEST(Cursor, RefusesNegativeAndEnormousLengths) {
  Cursor c(as_bytes("abc"), "f");
  EXPECT_FALSE(c.take(-1, "name"));
  EXPECT_FALSE(c.take(INT64_MAX, "name"));
  EXPECT_FALSE(c.skip(4, "name"));
  EXPECT_FALSE(c.read<std::uint32_t>("size"));
  EXPECT_EQ(c.left(), 3);
}

TEST(Cursor, TakesNothingAtTheEnd) {
  Cursor c(as_bytes(""), "f");
  EXPECT_TRUE(c.done());
  EXPECT_EQ(c.take(0, "nothing")->size(), 0U);
  EXPECT_EQ(c.take(1, "byte").error().message(), "f@0x0: byte: expected 1 byte, got 0 before the end");
}

TEST(Cursor, ASubCursorIsBoundedByItsOwnLengthAndKnowsItsPlaceInTheFile) {
  Cursor c(as_bytes("headbodytail"), "f", 100);
  ASSERT_TRUE(c.skip(4, "head"));
  Cursor body = *c.sub(4, "body");
  EXPECT_EQ(c.offset(), 108);
  EXPECT_EQ(body.offset(), 104);
  EXPECT_EQ(as_string(*body.take(4, "all")), "body");
  EXPECT_EQ(body.take(1, "more").error().message(), "f@0x6c: more: expected 1 byte, got 0 before the end");
  EXPECT_FALSE(c.sub(5, "too much"));
}

TEST(Cursor, AnErrorOfTheCallersStandsAtTheCurrentPlace) {
  Cursor c(as_bytes("abcdef"), "f", 16);
  ASSERT_TRUE(c.skip(1, "a"));
  EXPECT_EQ(c.error("version", "expected 2, got 9").message(), "f@0x11: version: expected 2, got 9");
}

}  // namespace
}  // namespace reshard::cursor_test
