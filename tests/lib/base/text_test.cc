#include "lib/base/text.h"

#include <fnmatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

#include "lib/base/json.h"
#include "lib/base/printable.h"
#include "tests/support/soak.h"

namespace reshard::text_test {
namespace {

TEST(Text, WithCommas) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(1498482688), "1,498,482,688");
  EXPECT_EQ(with_commas(-100), "-100");
  EXPECT_EQ(with_commas(-1000), "-1,000");
  EXPECT_EQ(with_commas(INT64_MAX), "9,223,372,036,854,775,807");
}

TEST(Text, CountsAgreeWithTheirNouns) {
  EXPECT_EQ(count_of(1, "entry"), "1 entry");
  EXPECT_EQ(count_of(1200, "entry"), "1,200 entries");
  EXPECT_EQ(count_of(0, "tensor"), "0 tensors");
  EXPECT_EQ(count_of(2, "key"), "2 keys");
  EXPECT_EQ(count_of(3, "other box"), "3 other boxes");
  EXPECT_EQ(count_of(2, "batch"), "2 batches");
}

TEST(Text, HumanBytesKeepsThreeDigits) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(864), "864 B");
  EXPECT_EQ(human_bytes(1000), "1.00 kB");
  EXPECT_EQ(human_bytes(9'994), "9.99 kB");
  EXPECT_EQ(human_bytes(9'996), "10.0 kB");
  EXPECT_EQ(human_bytes(99'960), "100 kB");
  EXPECT_EQ(human_bytes(999'499), "999 kB");
  EXPECT_EQ(human_bytes(999'500), "1.00 MB");
  EXPECT_EQ(human_bytes(2'996'965'376), "3.00 GB");
  EXPECT_EQ(human_bytes(INT64_MAX), "9.22 EB");
}

TEST(Text, HumanSeconds) {
  EXPECT_EQ(human_seconds(0.0123), "12 ms");
  EXPECT_EQ(human_seconds(0.0994), "99 ms");
  EXPECT_EQ(human_seconds(0.0996), "0.1 s");
  EXPECT_EQ(human_seconds(0.4), "0.4 s");
  EXPECT_EQ(human_seconds(59.94), "59.9 s");
  EXPECT_EQ(human_seconds(59.97), "1 m 00 s");
  EXPECT_EQ(human_seconds(80), "1 m 20 s");
}

TEST(Text, ParseBytesTakesDecimalAndBinaryUnits) {
  EXPECT_EQ(*parse_bytes("1000"), 1000);
  EXPECT_EQ(*parse_bytes("0"), 0);
  EXPECT_EQ(*parse_bytes("64B"), 64);
  EXPECT_EQ(*parse_bytes("100kB"), 100'000);
  EXPECT_EQ(*parse_bytes("5GB"), 5'000'000'000);
  EXPECT_EQ(*parse_bytes("5 GB"), 5'000'000'000);
  EXPECT_EQ(*parse_bytes("1.5MiB"), 3 << 19);
  EXPECT_EQ(*parse_bytes("256MiB"), 256 << 20);
}

TEST(Text, ParseBytesRefusesWhatIsNoSize) {
  for (const char* bad : {"", "GB", "-1", "5XB", "5gb", "1.2.3", ".", "1e3", "12345678TB", "0x10", "5 GB "}) {
    const auto r = parse_bytes(bad);
    ASSERT_FALSE(r) << bad;
    EXPECT_EQ(r.error().code(), ErrorCode::kUsage);
    EXPECT_EQ(r.error().message(), "'" + std::string(bad) + "' is not a size; write one like 256MiB, 5GB or 1000");
  }
}

// Compares with the C library's fnmatch, which matches as a shell does.
void expect_same_as_fnmatch(std::string_view pattern_alphabet, std::string_view name_alphabet, std::uint32_t seed) {
  std::mt19937 rng(seed);
  const auto random_text = [&](std::string_view alphabet, std::size_t longest) {
    std::string s(rng() % (longest + 1), ' ');
    for (char& c : s) c = alphabet[rng() % alphabet.size()];
    return s;
  };
  int matches = 0;
  for (int i = 0; i < 50'000; ++i) {
    const std::string pattern = random_text(pattern_alphabet, 8), name = random_text(name_alphabet, 8);
    const bool expected = ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
    ASSERT_EQ(glob_match(pattern, name), expected) << pattern << " on " << name;
    matches += expected;
  }
  EXPECT_GT(matches, 500);
}

TEST(Text, GlobMatchesAsAShellDoes) {
  expect_same_as_fnmatch("ab*?[]", "ab[", 3);
  expect_same_as_fnmatch("ac*[]!^-", "abc-]!^", 4);
  expect_same_as_fnmatch("059*[]-!", "0123456789.", 5);
  expect_same_as_fnmatch("az[]-\\?", "abyz\\-", 6);
}

TEST(Text, GlobSetsHaveRangesAndNegation) {
  EXPECT_TRUE(glob_match("layers.[0-3].*", "layers.2.x"));
  EXPECT_FALSE(glob_match("layers.[0-3].*", "layers.4.x"));
  EXPECT_FALSE(glob_match("layers.[!0-3].*", "layers.2.x"));
  EXPECT_FALSE(glob_match("layers.[^0-3].*", "layers.2.x"));
  EXPECT_TRUE(glob_match("[!l]*", "model.norm"));
  EXPECT_FALSE(glob_match("[!l]*", "layers.0"));
  EXPECT_TRUE(glob_match("[]x]", "]")) << "in front it stands for itself";
  EXPECT_FALSE(glob_match("[!]x]", "]"));
  EXPECT_TRUE(glob_match("[a-]", "-"));
  EXPECT_TRUE(glob_match("[-a]", "-"));
  EXPECT_FALSE(glob_match("[z-a]", "m")) << "a range from high to low is empty";
  EXPECT_TRUE(glob_match("[a", "[a")) << "no set without its end";
}

TEST(Text, GlobCountsCharactersNotBytes) {
  EXPECT_TRUE(glob_match("?", "\xc3\xa9"));
  EXPECT_TRUE(glob_match("[\xc3\xa8-\xc3\xaa].x", "\xc3\xa9.x"));
  EXPECT_FALSE(glob_match("[!\xc3\xa9]", "\xc3\xa9"));
  EXPECT_TRUE(glob_match("*?\xa9", "\xc3\xa9\xa9")) << "a byte that begins no character is one";
  EXPECT_FALSE(glob_match("*\xa9", "\xc3\xa9"));
}

TEST(Text, GlobTakesDotsAndSlashesLikeAnyOther) {
  EXPECT_TRUE(glob_match("optimizer.*", "optimizer.state.layers.0.weight.exp_avg"));
  EXPECT_TRUE(glob_match("layers.[01].*.weight", "layers.1.attention.wq.weight"));
  EXPECT_FALSE(glob_match("layers.[01].*", "layers.10.x"));
  EXPECT_FALSE(glob_match("*.bias", "bias"));
  EXPECT_TRUE(any_glob_matches({"x", "y*"}, "yz"));
  EXPECT_FALSE(any_glob_matches({}, "yz"));
}

TEST(Text, GlobKnowsTheNumbersOfFoldedNames) {
  EXPECT_TRUE(glob_match("layers.{0..15}.wq", "layers.0.wq"));
  EXPECT_TRUE(glob_match("layers.{0..15}.wq", "layers.15.wq"));
  EXPECT_FALSE(glob_match("layers.{0..15}.wq", "layers.16.wq"));
  EXPECT_FALSE(glob_match("layers.{0..15}.wq", "layers.01.wq")) << "not how names are numbered";
  EXPECT_FALSE(glob_match("layers.{0..15}.wq", "layers..wq"));
  EXPECT_TRUE(glob_match("*.{1,3,5..7}.*", "model.layers.6.w{1}"));
  EXPECT_FALSE(glob_match("*.{1,3,5..7}.*", "model.layers.4.w"));
  EXPECT_FALSE(glob_match("*{5}", "layers.15")) << "a number is taken whole";
  EXPECT_TRUE(glob_match("experts.{0..7}.w{1..3}", "experts.7.w2"));
  EXPECT_TRUE(glob_match("{0..999999999999999999}", "999999999999999999"));
  EXPECT_FALSE(glob_match("{0..999999999999999999}", "1000000000000000000"));
}

TEST(Text, BracesThatHoldNoNumbersAreOrdinaryCharacters) {
  EXPECT_TRUE(glob_match("a{b}", "a{b}"));
  EXPECT_TRUE(glob_match("{0..}", "{0..}"));
  EXPECT_TRUE(glob_match("{", "{"));
  EXPECT_TRUE(glob_match("{}", "{}"));
  EXPECT_FALSE(glob_match("{1}", "{1}"));
}

TEST(Text, AnEscapedNameMatchesItselfAlone) {
  for (const std::string name : {"layers.0.wq", "a*b", "what?", "x[0]", "{1..3}", "[", "]", "a[*]{?"}) {
    EXPECT_TRUE(glob_match(glob_escaped(name), name)) << name;
    EXPECT_FALSE(glob_match(glob_escaped(name), name + "x")) << name;
  }
  EXPECT_FALSE(glob_match(glob_escaped("a*b"), "axb"));
  EXPECT_FALSE(glob_match(glob_escaped("{1..3}"), "2"));
}

TEST(Text, GlobWithManyStarsIsFast) {
  std::string pattern;
  for (int i = 0; i < 1000; ++i) pattern += "a*";
  EXPECT_FALSE(glob_match(pattern + "b", std::string(5000, 'a')));
}

std::string utf8(char32_t c) {
  std::string json = "\"";
  char escape[16];
  if (c < 0x10000)
    std::snprintf(escape, sizeof escape, "\\u%04x\"", static_cast<unsigned>(c));
  else
    std::snprintf(escape, sizeof escape, "\\u%04x\\u%04x\"", static_cast<unsigned>(0xd800 + ((c - 0x10000) >> 10)),
                  static_cast<unsigned>(0xdc00 + ((c - 0x10000) & 0x3ff)));
  return std::string(*parse_json(json + escape, "text")->as_string());
}

TEST(Text, JsonMadePrintableHasTheSameValues) {
  const auto step = static_cast<char32_t>(64 * every_nth(8));
  for (char32_t first = 1; first < 0x110000; first += step) {
    std::string text;
    for (char32_t c = first; c < first + 64; ++c)
      if (c < 0xd800 || (c >= 0xe000 && c < 0x110000)) text += utf8(c);
    std::string json;
    append_json_string(json, text);
    const std::string safe = printable_json(json);
    ASSERT_EQ(*parse_json(safe, "text")->as_string(), text) << static_cast<unsigned>(first);
    ASSERT_EQ(printable_lines(safe), safe) << static_cast<unsigned>(first);
  }
}

TEST(Text, PrintableShowsCharactersThatHaveNoWidthOrTurnTheText) {
  for (const char32_t c :
       {0xadu, 0x61cu, 0x180eu, 0x200bu, 0x200fu, 0x202eu, 0x2066u, 0x3164u, 0xfe0fu, 0xfeffu, 0xe0041u})
    EXPECT_THAT(printable("a" + utf8(c)), testing::StartsWith("a\\x")) << static_cast<unsigned>(c);
  EXPECT_EQ(printable_lines("one\ntwo\x1b"), "one\ntwo\\x1b");
}

TEST(Text, PrintableHidesControlBytes) {
  EXPECT_EQ(printable("layers.0"), "layers.0");
  EXPECT_EQ(printable(std::string_view("a\x1b[2J\n\0\x7f", 8)), "a\\x1b[2J\\x0a\\x00\\x7f");
  for (const char* text : {"\xc3\xa9", "\xe6\xbc\xa2", "\xf0\x9f\x98\x80", "\xed\x9f\xbf", "\xc2\xa0"})
    EXPECT_EQ(printable(text), text);
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b2J");  // U+009B, the C1 CSI
  EXPECT_EQ(printable("a\xe2\x80\xae"
                      "b\xe2\x81\xa6"),
            "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa6");            // U+202E, U+2066
  EXPECT_EQ(printable("\xe2\x80\xa8"), "\\xe2\\x80\\xa8");  // U+2028
  // Bytes that are not UTF-8: a lone continuation byte, a truncated sequence, an overlong form, a surrogate, a number
  // beyond U+10FFFF.
  EXPECT_EQ(printable("\x9b"
                      "2J\xc3"),
            "\\x9b2J\\xc3");
  EXPECT_EQ(printable("\xe6\xbc"
                      "a"),
            "\\xe6\\xbc"
            "a");
  EXPECT_EQ(printable("\xc0\x9b\xe0\x82\x9b"), "\\xc0\\x9b\\xe0\\x82\\x9b");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

TEST(Text, SplitAndJoinAreInverse) {
  EXPECT_EQ(split("a,,b", ','), (std::vector<std::string>{"a", "", "b"}));
  EXPECT_EQ(split("", ','), std::vector<std::string>{""});
  EXPECT_EQ(join(split("a,,b,", ','), ","), "a,,b,");
  EXPECT_EQ(join({}, ","), "");
}

}  // namespace
}  // namespace reshard::text_test
