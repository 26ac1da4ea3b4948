#include "lib/base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "lib/base/json_list.h"
#include "lib/base/json_parts.h"

namespace reshard::json_test {
namespace {

Json parsed(std::string_view text) {
  auto json = parse_json(text, "t.json");
  EXPECT_TRUE(json) << json.error().message();
  return json ? *std::move(json) : Json();
}

std::string refusal(std::string_view text, const JsonLimits& limits = {}) {
  const auto json = parse_json(text, "t.json", limits);
  return json ? "accepted: " + to_text(*json) : json.error().message();
}

template <class T>
std::string message(const Result<T>& result) {
  return result.has_value() ? "fine" : result.error().message();
}

TEST(Json, ReadsEveryKindOfValue) {
  const Json json =
      parsed(R"( {"n":null,"b":true,"i":-7,"u":18446744073709551615,"d":0.5,"s":"a\"\u00e9","l":[1,[]],"o":{}} )");
  EXPECT_TRUE(json.find("n")->is_null());
  EXPECT_TRUE(*json.get_bool("b"));
  EXPECT_EQ(*json.get_index("i"), -7);
  EXPECT_EQ(*json.find("u")->as_uint64(), UINT64_MAX);
  EXPECT_EQ(*json.find("d")->as_double(), 0.5);
  EXPECT_EQ(*json.find("i")->as_double(), -7.0);
  EXPECT_EQ(*json.get_string("s"), "a\"\xc3\xa9");
  EXPECT_EQ(json.get_array("l")->size(), 2u);
  EXPECT_EQ(json.get_object("o")->size(), 0u);
  EXPECT_EQ(json.size(), 8u);
  EXPECT_EQ(json.find("x"), nullptr);
}

TEST(Json, ScalarsStandAlone) {
  EXPECT_EQ(*parsed("12").as_index(), 12);
  EXPECT_EQ(*parsed("\"x\"").as_string(), "x");
  EXPECT_TRUE(parsed(" null ").is_null());
}

TEST(Json, IntegersAreExactOrRefused) {
  EXPECT_EQ(*parsed("9223372036854775807").as_index(), INT64_MAX);
  EXPECT_EQ(*parsed("-9223372036854775808").as_index(), INT64_MIN);
  EXPECT_EQ(*parsed("9007199254740993").as_index(), 9007199254740993);  // 2^53 + 1, which no double can represent
  EXPECT_EQ(message(parsed("9223372036854775808").as_index()),
            "expected an integer below 2^63, got 9223372036854775808");
  EXPECT_EQ(message(parsed("-1").as_uint64()), "expected an integer of at least 0, got -1");
  EXPECT_EQ(message(parsed("1.0").as_index()), "expected an integer, got a fraction");
  EXPECT_EQ(refusal("[18446744073709551616]"),
            "t.json@0x1: expected an integer of at most 64 bits, got 18446744073709551616");
  EXPECT_EQ(refusal("-9223372036854775809"),
            "t.json@0x0: expected an integer of at most 64 bits, got -9223372036854775809");
  EXPECT_EQ(refusal("[1e400]"), "t.json@0x5: number overflow parsing '1e400'");
}

TEST(Json, RefusesWhatIsNotJson) {
  EXPECT_EQ(refusal(""),
            "t.json@0x0: syntax error while parsing value - unexpected end of input; expected '[', '{', or a literal");
  EXPECT_EQ(refusal("{} x"), "t.json@0x3: syntax error while parsing value - invalid literal; expected end of input");
  EXPECT_EQ(refusal("{}{}"), "t.json@0x2: syntax error while parsing value - unexpected '{'; expected end of input");
  EXPECT_EQ(refusal("[1,]"),
            "t.json@0x3: syntax error while parsing value - unexpected ']'; expected '[', '{', or a literal");
  EXPECT_EQ(refusal(std::string("{}\0", 3)), "t.json@0x2: expected JSON, got a zero byte");
  EXPECT_EQ(refusal("\xef\xbb\xbf{}"), "t.json@0x0: expected JSON, got a byte order mark");
  for (const char* text : {"{'a':1}", "// c\n1", "01", "+1", "1.", ".5", "\"\n\"", "[1 2]", "{\"a\"}", "tru", "\"",
                           "\"\\x\"", "\"\\ud800\"", "[", "{", "{\"a\":", "-", "1e"})
    EXPECT_TRUE(refusal(text).starts_with("t.json@0x")) << text << ": " << refusal(text);
}

// Python writes them, for example into configs of models.
TEST(Json, ReadsPythonsNumbers) {
  const Json json = parsed(R"({"a\"NaN": [NaN, -Infinity,Infinity], "b": "NaN", "c":Infinity, "": "\\", "d": NaN})");
  EXPECT_EQ(json.size(), 5u);
  const auto list = *json.get_array("a\"NaN");
  EXPECT_TRUE(std::isnan(*list[0].as_double()));
  EXPECT_EQ(*list[1].as_double(), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(*list[2].as_double(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(*json.get_string("b"), "NaN");
  EXPECT_TRUE(json.find("c")->is_number() && json.find("d")->is_number());
  EXPECT_EQ(message(json.get_index("c")), "c: expected an integer, got a fraction");
  EXPECT_TRUE(std::isinf(*parsed("Infinity").as_double()));
  EXPECT_EQ(to_text(json), R"({"a\"NaN":[null,null,null],"b":"NaN","c":null,"":"\\","d":null})");
  EXPECT_EQ(python_text(json),
            "{\n  \"a\\\"NaN\": [\n    NaN,\n    -Infinity,\n    Infinity\n  ],\n  \"b\": \"NaN\",\n"
            "  \"c\": Infinity,\n  \"\": \"\\\\\",\n  \"d\": NaN\n}\n");
  EXPECT_EQ(refusal("{\"a\": NaN, NaN: 1}"), "t.json@0xd: expected a string for a key, got a number");
  EXPECT_EQ(refusal("[1, NaNs]").substr(0, 10), "t.json@0x7");
  for (const char* text : {"-NaN", "+Infinity", "nan", "inf", "Inf", "NaN NaN", "1NaN", "NaNInfinity", "[Infinit]",
                           "--Infinity", "{NaN}", "[NaN\"a\"]", "NaN:", "\"NaN", "Infinity\""})
    EXPECT_TRUE(refusal(text).starts_with("t.json@0x")) << text << ": " << refusal(text);
}

TEST(Json, RefusesTextThatIsNotUtf8) {
  EXPECT_EQ(refusal("[\"\xff\"]"),
            "t.json@0x2: syntax error while parsing value - invalid string: ill-formed UTF-8 byte");
  for (const char* text : {"\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xe2\x82\"", "\x80"})
    EXPECT_FALSE(parse_json(text, "t.json"));
}

TEST(Json, RefusesDuplicateKeys) {
  EXPECT_EQ(refusal(R"({"a":1,"b":2,"a":3})"), "t.json@0xf: duplicate key 'a'");
  EXPECT_EQ(refusal("{\"a\":1,\"\\u0061\":3}"), "t.json@0xe: duplicate key 'a'");
  std::string text = "{";
  for (int i = 0; i < 1000; ++i) text += "\"k" + std::to_string(i) + "\":0,";
  EXPECT_TRUE(refusal(text + "\"k500\":1}").ends_with("duplicate key 'k500'"));
  EXPECT_EQ(parsed(text + "\"k\":1}").size(), 1001u);
}

TEST(Json, LimitsDepthAndNumberOfValues) {
  EXPECT_TRUE(parse_json(std::string(64, '[') + std::string(64, ']'), "t.json"));
  EXPECT_EQ(refusal(std::string(65, '[') + std::string(65, ']')), "t.json@0x40: expected at most 64 levels of nesting");
  EXPECT_EQ(refusal(std::string(1'000'000, '[')), "t.json@0x40: expected at most 64 levels of nesting");
  EXPECT_EQ(refusal("[0,0,0]", {.values = 3, .until = {}}), "t.json@0x6: expected at most 3 values");
  EXPECT_EQ(to_text(*parse_json("[0,0]", "t.json", {.values = 3, .until = {}})), "[0,0]");
}

TEST(Json, AMessageStaysShortHoweverLongTheToken) {
  EXPECT_LT(refusal("\"" + std::string(100'000, 'x')).size(), 300u);
  EXPECT_LT(refusal(std::string(100'000, '9')).size(), 300u);
  EXPECT_LT(refusal("1" + std::string(100'000, '0') + ".0").size(), 300u);
  EXPECT_LT(refusal("{\"" + std::string(9999, 'k') + "\":1,\"" + std::string(9999, 'k') + "\":1}").size(), 300u);
}

TEST(Json, OffsetsCountFromTheBase) {
  EXPECT_EQ(parse_json("[1", "f", {}, 8).error().message(),
            "f@0xa: syntax error while parsing array - unexpected end of input; expected ']'");
}

TEST(Json, GettersNameTheKeyAndWhatIsThere) {
  const Json config = parsed(R"({"num_attention_heads":"32","x":[],"f":1.5})");
  EXPECT_EQ(message(config.get_index("num_attention_heads").context("config.json")),
            "config.json: num_attention_heads: expected an integer, got a string");
  EXPECT_EQ(message(config.get_index("hidden")), "hidden: expected an integer, got nothing");
  EXPECT_EQ(message(config.get_string("x")), "x: expected a string, got an array");
  EXPECT_EQ(message(config.get_array("f")), "f: expected an array, got a fraction");
  EXPECT_EQ(message(config.get_bool("f")), "f: expected a boolean, got a fraction");
  EXPECT_EQ(message(config.get_object("f")), "f: expected an object, got a fraction");
  EXPECT_EQ(message(config.find("x")->as_double()), "expected a number, got an array");
  EXPECT_EQ(message(config.find("x")->get_bool("y")), "y: expected a boolean, got a value that is not an object");
}

TEST(Json, MembersKeepTheirOrder) {
  Json json = Json::object();
  json.set("z", 1).set("a", "two").set("m", Json::array());
  json.set("a", true);
  EXPECT_EQ(to_text(json), R"({"z":1,"a":true,"m":[]})");
  const Json copy = json;
  json.set("z", 9);
  EXPECT_EQ(*copy.get_index("z"), 1);
}

TEST(Json, FindsEachOfManyMembers) {
  Json json;
  for (int i = 0; i < 5000; ++i) json.set("key" + std::to_string(i * 7919 % 5000), i);
  Json copy = json;
  json = std::move(copy);
  EXPECT_EQ(json.size(), 5000u);
  for (int i = 0; i < 5000; ++i) EXPECT_EQ(*json.get_index("key" + std::to_string(i * 7919 % 5000)), i);
  EXPECT_FALSE(json.contains("key5000"));
  EXPECT_EQ(json.try_add("key0"), nullptr);
}

// set() and push_back() both return the object or array, so calls can be chained.
TEST(Json, MembersAndItemsAreAddedAlike) {
  const Json json = Json::object().set("list", Json::array().push_back(1).push_back("two")).set("empty", Json::array());
  EXPECT_EQ(to_text(json), R"({"list":[1,"two"],"empty":[]})");
  Json list;
  list.add_item(Json()).set("a", 1);
  EXPECT_EQ(to_text(list), R"([{"a":1}])");
}

TEST(Json, TextIsIndentedAsPythonDoes) {
  Json json;
  json.set("metadata", Json::object().set("total_size", 12));
  json.set("weight_map", Json::object().set("w", "model.safetensors"));
  Json list;
  list.push_back(1);
  list.push_back(Json());
  json.set("l", std::move(list)).set("e", Json::object());
  EXPECT_EQ(to_text(json, 2), R"({
  "metadata": {
    "total_size": 12
  },
  "weight_map": {
    "w": "model.safetensors"
  },
  "l": [
    1,
    null
  ],
  "e": {}
})");
}

TEST(Json, DoublesRoundTrip) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    const auto bits = random();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    if (!std::isfinite(value)) continue;
    const Json back = parsed(to_text(value));
    EXPECT_TRUE(!back.is_integer());
    EXPECT_EQ(*back.as_double(), value);
  }
  EXPECT_EQ(to_text(1.0), "1.0");
  EXPECT_EQ(to_text(0.1), "0.1");
  EXPECT_EQ(to_text(std::numeric_limits<double>::infinity()), "null");
}

TEST(Json, StringsRoundTrip) {
  std::string all;
  for (int c = 1; c < 128; ++c) all += static_cast<char>(c);
  all += "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
  EXPECT_EQ(*parsed(to_text(all)).as_string(), all);
  EXPECT_EQ(to_text("a\n\x01\"\\"), R"("a\n\u0001\"\\")");
}

TEST(Json, HandsOverMembersOneByOne) {
  std::string seen;
  const auto collect = [&](const std::string& key, Json value) -> Status {
    seen += key + "=" + to_text(value) + ";";
    return {};
  };
  EXPECT_TRUE(parse_json_members(R"({"a":1,"b":{"c":[2,{"d":3}]},"e":[],"":null})", "t.json", collect));
  EXPECT_EQ(seen, R"(a=1;b={"c":[2,{"d":3}]};e=[];=null;)");
  EXPECT_EQ(message(parse_json_members("[1]", "t.json", collect)), "t.json@0x0: expected an object, got an array");
  EXPECT_EQ(message(parse_json_members("1", "t.json", collect)), "t.json@0x0: expected an object, got an integer");
  EXPECT_EQ(message(parse_json_members(R"({"a":1,"a":2})", "t.json", collect)), "t.json@0x9: duplicate key 'a'");
  const auto refuse = [](const std::string& key, Json) -> Status { return unsupported("no " + key); };
  EXPECT_EQ(message(parse_json_members(R"({"a":1,"b":2)", "t.json", refuse)), "no a");
}

TEST(Json, HandsOverOneMemberInParts) {
  std::string seen, parts;
  const auto collect = [](std::string& into) {
    return [&into](const std::string& key, const Json& value) -> Status {
      into += key + "=" + to_text(value) + ";";
      return {};
    };
  };
  const auto read = [&](std::string_view text, const JsonLimits& limits = {}) {
    seen = parts = "";
    return parse_json_parts(text, "t.json", collect(seen), {"b", collect(parts)}, limits);
  };
  EXPECT_TRUE(read(R"({"a":{"b":{"x":1}},"b":{"c":[2,{"b":3}],"b":{"b":4},"e":5},"f":6})"));
  EXPECT_EQ(parts, R"(c=[2,{"b":3}];b={"b":4};e=5;)");
  EXPECT_EQ(seen, R"(a={"b":{"x":1}};b={};f=6;)");
  EXPECT_TRUE(read(R"({"b":[1,[2],{"b":[3]},[]]})"));
  EXPECT_EQ(parts, R"(=1;=[2];={"b":[3]};=[];)");
  EXPECT_EQ(seen, "b=[];");
  EXPECT_TRUE(read(R"({"b":7})"));
  EXPECT_EQ(parts + seen, "b=7;");
  EXPECT_EQ(message(read(R"({"b":{"c":1,"c":2}})")), "t.json@0xe: duplicate key 'c'");
  EXPECT_THAT(message(read("[1]")), testing::HasSubstr("expected an object"));
  // Only the keys of parts that were passed on take memory.
  JsonLimits few;
  few.values = 6;
  EXPECT_TRUE(read(R"({"b":[[1,2],[3,4],[5,6],[7,8]]})", few));
  EXPECT_FALSE(read(R"({"b":[[1,2,3,4,5]]})", few));
}

TEST(Json, AListMadeItemByItemIsWrittenAsItStands) {
  for (const std::size_t n : {0u, 1u, 3u}) {
    Json object = Json::object();
    object.set("a", 1).set("b", Json::object());
    Json list = Json::array();
    const auto item = [](std::size_t i) { return Json::object().set("i", i).set("none", Json::array()); };
    for (std::size_t i = 0; i < n; ++i) list.push_back(item(i));
    for (const int indent : {0, 2}) {
      std::string text;
      std::size_t made = 0, longest = 0;
      const auto write = [&](std::string_view part) {
        text += part;
        longest = std::max(longest, made);
        made = 0;
      };
      write_text(object, {"list", n, [&](std::size_t i) { return ++made, item(i); }}, indent, write);
      EXPECT_EQ(text, to_text(Json(object).set("list", list), indent));
      EXPECT_LE(longest, 1u) << "items are handed on one by one";
    }
  }
}

TEST(Json, MembersHandedOverNoLongerCount) {
  const auto ignore = [](const std::string&, Json) -> Status { return {}; };
  EXPECT_TRUE(
      parse_json_members(R"({"a":[1,2,3],"b":[1,2,3],"c":[1,2,3]})", "t.json", ignore, {.values = 8, .until = {}}));
  EXPECT_FALSE(parse_json_members(R"({"a":[1,2,3],"b":[1,2,3,4,5,6]})", "t.json", ignore, {.values = 8, .until = {}}));
}

TEST(Json, EveryPrefixOfATextIsRefused) {
  const std::string text = R"({"a":[1,-2.5e3,true,null],"b":{"c":"\u00e9x"}})";
  for (std::size_t n = 0; n < text.size(); ++n) EXPECT_FALSE(parse_json(text.substr(0, n), "t.json")) << n;
  EXPECT_EQ(to_text(parsed(text)), "{\"a\":[1,-2500.0,true,null],\"b\":{\"c\":\"\xc3\xa9x\"}}");
}

TEST(Utf8, KnowsWellFormedText) {
  for (const char* text : {"", "abc", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_utf8(text)) << text;
  for (const char* text : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe2\x82",
                           "\xe2\x82q", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "a\xc3"})
    EXPECT_FALSE(is_utf8(text));
}

}  // namespace
}  // namespace reshard::json_test
