#include "formats/encoding/pickle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "formats/encoding/pickle_writer.h"
#include "lib/base/file.h"

namespace reshard::pickle_test {
namespace {

using pickle::Document;
using pickle::Kind;
using pickle::Value;

std::string data(const std::string& name) {
  auto bytes = read_whole_file(std::string(RESHARD_TEST_DATA "/dcp_small/") + name, 1 << 20);
  EXPECT_TRUE(bytes) << bytes.error().message();
  return bytes ? *bytes : "";
}

std::string bytes_of(std::initializer_list<std::string> parts) {
  std::string out;
  for (const std::string& p : parts) out += p;
  return out;
}
std::string raw(const char* text, std::size_t n) { return {text, n}; }
std::string text_op(const std::string& s) { return std::string("\x8c") + static_cast<char>(s.size()) + s; }

Document parsed(std::string bytes) {
  auto document = pickle::parse(std::move(bytes), "p");
  EXPECT_TRUE(document) << document.error().message();
  return std::move(*document);
}
std::string printed(std::string bytes) { return pickle::print(parsed(std::move(bytes)).root(), 10, 100); }
std::string error_of(std::string bytes, const pickle::Limits& limits = {}) {
  auto document = pickle::parse(std::move(bytes), "p", limits);
  return document ? "" : document.error().message();
}

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";

TEST(Pickle, ReadsTheMetadataOfARealCheckpoint) {
  const Document document = parsed(data("ck2/.metadata"));
  const Value root = document.root();
  ASSERT_TRUE(root.is_object(kMetadata, "Metadata"));
  const Value tensors = *root.state().find("state_dict_metadata");
  EXPECT_EQ(tensors.size(), 3u);
  const Value w = *tensors.find("w");
  ASSERT_TRUE(w.is_object(kMetadata, "TensorStorageMetadata"));
  EXPECT_EQ(pickle::print(*w.state().find("size")), "(2, 3)");
  const Value properties = *w.state().find("properties");
  ASSERT_EQ(properties.state().kind(), Kind::kTuple);
  EXPECT_TRUE(properties.state()[0].is_global("torch", "bfloat16"));
  const Value chunks = *w.state().find("chunks");
  ASSERT_EQ(chunks.kind(), Kind::kList);
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(pickle::print(*chunks[0].state().find("offsets")), "(0, 0)");

  const Value storage = *root.state().find("storage_data");
  ASSERT_EQ(storage.size(), 3u);
  bool found = false;
  for (std::size_t i = 0; i < storage.size(); ++i) {
    if (storage.key(i).state().find("fqn")->as_string() != "w") continue;
    found = true;
    EXPECT_EQ(storage.value(i).state().find("relative_path")->as_string(), "__0_0.distcp");
    EXPECT_EQ(storage.value(i).state().find("offset")->as_int(), 864);
    EXPECT_EQ(storage.value(i).state().find("length")->as_int(), 1180);
  }
  EXPECT_TRUE(found);
}

TEST(Pickle, ReferencesToOneObjectHaveOneIdentity) {
  const Document document = parsed(data("ck2/.metadata"));
  const Value tensors = *document.root().state().find("state_dict_metadata");
  const Value w = tensors.find("w")->state().find("properties")->state();
  const Value v = tensors.find("v")->state().find("properties")->state();
  EXPECT_EQ(w[0].identity(), v[0].identity());
  EXPECT_NE(tensors.find("w")->identity(), tensors.find("v")->identity());
}

TEST(Pickle, ReadsScalarsOfEveryWidth) {
  EXPECT_EQ(printed("K\xff."), "255");
  EXPECT_EQ(printed("M\xff\xff."), "65535");
  EXPECT_EQ(printed("J\xff\xff\xff\xff."), "-1");
  EXPECT_EQ(printed(raw("J\x00\x00\x00\x80.", 6)), "-2147483648");
  EXPECT_EQ(printed(raw("\x8a\x00.", 3)), "0");
  EXPECT_EQ(printed(raw("\x8a\x01\x80.", 4)), "-128");
  EXPECT_EQ(printed(raw("\x8a\x06\x00\x00\x00\x00\x00\x01.", 9)), "1099511627776");
  EXPECT_EQ(printed("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f."), "9223372036854775807");
  EXPECT_EQ(printed(raw("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", 11)), "-9223372036854775808");
  EXPECT_EQ(printed(raw("\x8b\x02\x00\x00\x00\x39\x30.", 8)), "12345");
  EXPECT_EQ(printed(raw("G\x3f\xb9\x99\x99\x99\x99\x99\x9a.", 10)), "0.1");
}

TEST(Pickle, IntegersBeyond64BitsKeepTheirDigits) {
  const Document document = parsed(raw("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.", 12));
  EXPECT_EQ(document.root().kind(), Kind::kBigInt);
  EXPECT_FALSE(document.root().as_int());
  EXPECT_EQ(document.root().big_int_text(), "0x8000000000000000");
  EXPECT_EQ(parsed(raw("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff.", 12)).root().big_int_text(),
            "-0x8000000000000001");
  // A number of nine bytes that fits into eight.
  EXPECT_EQ(parsed(raw("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\xff.", 12)).root().as_int(), -1);
}

TEST(Pickle, ContainersGrowInBatches) {
  std::string bytes = "]";
  for (int batch = 0; batch < 5; ++batch) {
    bytes += "(";
    for (int i = 0; i < 7; ++i) bytes += std::string("K") + static_cast<char>(batch * 7 + i);
    bytes += "e";
  }
  bytes +=
      "K\x64"
      "a.";
  const Document document = parsed(bytes);
  ASSERT_EQ(document.root().size(), 36u);
  for (std::size_t i = 0; i < 35; ++i) EXPECT_EQ(document.root()[i].as_int(), static_cast<Index>(i));
  EXPECT_EQ(document.root()[35].as_int(), 100);
}

TEST(Pickle, TheLastOfTwoEqualKeysCounts) {
  const Document document = parsed(bytes_of({"}(", text_op("a"), "K\x01", text_op("a"), "K\x02u."}));
  EXPECT_EQ(document.root().size(), 2u);
  EXPECT_EQ(document.root().find("a")->as_int(), 2);
  EXPECT_FALSE(document.root().find("b"));
}

TEST(Pickle, CallsStayInertAndAreListed) {
  const Document document = parsed(bytes_of({"cos\nsystem\n", text_op("rm -rf /"), "\x85R."}));
  EXPECT_EQ(document.root().kind(), Kind::kObject);
  EXPECT_TRUE(document.root().is_object("os", "system"));
  EXPECT_EQ(document.root().args()[0].as_string(), "rm -rf /");
  EXPECT_EQ(document.globals(), std::vector<std::string>{"os.system"});
  // Globals count even if their value is dropped.
  EXPECT_EQ(parsed("cos\nsystem\n0N.").globals(), std::vector<std::string>{"os.system"});
}

TEST(Pickle, ObjectsHaveArgumentsKeywordsItemsAndState) {
  const Document document = parsed(bytes_of({"cm\nC\n", "K\x01\x85", "}(", text_op("k"), "K\x02u\x92",
                                             "K\x07"
                                             "a",
                                             "}b."}));
  const Value v = document.root();
  EXPECT_EQ(pickle::print(v.args()), "(1,)");
  EXPECT_EQ(v.keywords().find("k")->as_int(), 2);
  EXPECT_EQ(v.items()[0].as_int(), 7);
  EXPECT_EQ(v.state().kind(), Kind::kDict);
  EXPECT_EQ(pickle::print(v), "m.C(1).keywords({'k': 2}).items([7]).state({})");
}

TEST(Pickle, SizeIsATupleAndOrderedDictADict) {
  EXPECT_EQ(printed("ctorch\nSize\nK\x02K\x03\x86\x85R."), "(2, 3)");
  EXPECT_EQ(printed("ctorch\nSize\n)\x85R."), "()");
  EXPECT_EQ(printed(bytes_of({"ccollections\nOrderedDict\n)R", text_op("a"), "Ns."})), "{'a': None}");
}

// Python 2 pickles an OrderedDict as a call with a list of pairs; old weights are such (lpips 0.1.4 on PyPI).
TEST(Pickle, OrderedDictOfPairsIsADict) {
  const std::string call = "ccollections\nOrderedDict\n", a = text_op("a"), b = text_op("b");
  EXPECT_EQ(printed(bytes_of({call, "](](", a, "K\x01", "e](", b, "K\x02", "ee\x85R."})), "{'a': 1, 'b': 2}");
  EXPECT_EQ(printed(bytes_of({call, "](", a, "K\x01\x86", "e\x85R", b, "Ns."})), "{'a': 1, 'b': None}");
  EXPECT_EQ(printed(bytes_of({call, "]\x85R."})), "{}");
  EXPECT_EQ(printed(bytes_of({call, "](](", a, "K\x01", "ee\x85R}b."})), "{'a': 1}");
  EXPECT_EQ(printed(bytes_of({call, a, "\x85R."})), "collections.OrderedDict('a')");
  for (const std::string& list : {"](" + a + "e", "](](" + a + "ee"})
    EXPECT_THAT(error_of(bytes_of({call, list, "\x85R."})), testing::HasSubstr("expected pairs of keys and values"));
}

TEST(Pickle, CyclesArePrintedToALimit) {
  const Document document =
      parsed(raw("]\x94h\x00"
                 "a.",
                 6));
  EXPECT_EQ(document.root()[0].identity(), document.root().identity());
  EXPECT_EQ(pickle::print(document.root(), 3, 8), "[[[[...]]]]");
  EXPECT_LT(pickle::print(document.root(), 1 << 30, 1 << 30).size(), 5000u);
}

TEST(Pickle, NestingIsNotRecursion) {
  std::string bytes(500000, ']');
  bytes += std::string(499999, 'a') + ".";
  const Document document = parsed(bytes);
  Value v = document.root();
  int depth = 0;
  for (; v.size() == 1; v = v[0]) ++depth;
  EXPECT_EQ(depth, 499999);
  EXPECT_EQ(parsed("N" + std::string(1000000, '\x85') + ".").root().size(), 1u);
}

TEST(Pickle, RefusesLengthsBeyondTheEnd) {
  EXPECT_EQ(error_of(raw("\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", 11)),
            "p@0x0: BINUNICODE8: expected 9223372036854775807 bytes, got 2 before the end");
  EXPECT_EQ(error_of("\x8b\xff\xff\xff\xff."), "p@0x0: LONG4: expected 4294967295 bytes, got 1 before the end");
  EXPECT_EQ(error_of(raw("N0X\xff\xff\xff\xff.", 8)),
            "p@0x2: BINUNICODE: expected 4294967295 bytes, got 1 before the end");
  EXPECT_EQ(error_of("K"), "p@0x0: BININT1: expected 1 byte, got 0 before the end");
}

TEST(Pickle, RefusesMemoBombs) {
  EXPECT_EQ(error_of("Nr\xff\xff\xff\x7f."), "p@0x1: LONG_BINPUT: expected a memo index up to 1, got 2147483647");
  EXPECT_EQ(error_of("Np4000000000\n."), "p@0x1: PUT: expected a memo index up to 1, got 4000000000");
  EXPECT_EQ(error_of("h\x05."), "p@0x0: BINGET: expected a memo index that was put, got 5");
}

TEST(Pickle, RefusesWhatTheLimitsForbid) {
  pickle::Limits limits;
  limits.stack = 3;
  EXPECT_EQ(error_of("NNNN.", limits), "p@0x3: NONE: more than 3 values on the stack");
  limits = {};
  limits.cells = 4;
  EXPECT_EQ(error_of("]]].", limits), "p@0x2: EMPTY_LIST: more than 4 cells");
  limits = {};
  limits.globals = 1;
  EXPECT_EQ(error_of("ca\nb\ncc\nd\n.", limits), "p@0x5: GLOBAL: more than 1 different globals");
  limits = {};
  limits.bytes = 3;
  EXPECT_EQ(error_of("NNN.", limits), "p: pickle: expected at most 3 bytes, got 4");
}

TEST(Pickle, RefusesOpcodesItDoesNotKnow) {
  EXPECT_EQ(error_of("\x82\x01."), "p@0x0: opcode 0x82: not an opcode of a supported pickle");
  EXPECT_EQ(error_of("\x97."), "p@0x0: opcode 0x97: not an opcode of a supported pickle");
  EXPECT_EQ(error_of("\x80\x06N."), "p@0x0: PROTO: expected a protocol up to 5, got 6");
}

TEST(Pickle, RefusesStacksThatDoNotAddUp) {
  EXPECT_EQ(error_of("."), "p@0x0: STOP: expected one value on the stack, got 0");
  EXPECT_EQ(error_of("NN."), "p@0x2: STOP: expected one value on the stack, got 2");
  EXPECT_EQ(error_of("N.N"), "p@0x1: STOP: expected the end, got 1 more bytes");
  EXPECT_EQ(error_of("N"), "p@0x1: end of the pickle: expected STOP, got the end");
  EXPECT_EQ(error_of("N(\x85t."), "p@0x2: TUPLE1: expected 1 value on the stack, got 0");
  EXPECT_EQ(error_of("}(Nu."), "p@0x3: SETITEMS: expected keys and values in turn, got 1 of both");
  EXPECT_EQ(error_of("NNa."), "p@0x2: APPEND: expected a list to add to, got another value");
  EXPECT_EQ(error_of("N)R."), "p@0x2: REDUCE: expected a class or function to call");
  EXPECT_EQ(error_of("NNb."), "p@0x2: BUILD: expected an object to give a state to");
}

TEST(Pickle, EveryTruncationOfAMetadataIsAnError) {
  for (const char* name : {"ck2/.metadata", "wt/.metadata"}) {
    const std::string whole = data(name);
    for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_NE(error_of(whole.substr(0, n)), "") << name << " " << n;
  }
}

TEST(Pickle, EveryFlippedByteOfAMetadataIsReadOrRefused) {
  const std::string whole = data("ck2/.metadata");
  for (std::size_t i = 0; i < whole.size(); ++i)
    for (int flip : {0x01, 0x04, 0x40, 0x80, 0xff}) {
      std::string bytes = whole;
      bytes[i] = static_cast<char>(bytes[i] ^ flip);
      const auto document = pickle::parse(bytes, "p");
      if (document) (void)pickle::print(document->root(), 8, 8);
    }
}

TEST(Pickle, ReadsEveryMetadataOfTheSmallCheckpoints) {
  for (const char* name : {"ck1", "ck2", "ck4", "ck4low", "ckf_fsdp", "ckf_hsdp", "ckf_fsdptp", "ckz", "wt"})
    EXPECT_TRUE(parsed(data(std::string(name) + "/.metadata")).root().is_object(kMetadata, "Metadata")) << name;
}

TEST(PickleWriter, WritesWhatTheReaderReads) {
  pickle::PickleWriter w;
  w.empty_dict();
  w.mark();
  w.text("ints");
  w.empty_list();
  w.mark();
  const std::vector<Index> ints = {0,
                                   255,
                                   256,
                                   65535,
                                   65536,
                                   -1,
                                   INT32_MAX,
                                   INT32_MIN,
                                   Index{1} << 31,
                                   -(Index{1} << 31) - 1,
                                   (Index{1} << 39) - 1,
                                   Index{1} << 39,
                                   INT64_MAX,
                                   INT64_MIN};
  for (Index v : ints) w.integer(v);
  w.append_items();
  w.text("half");
  w.number(0.5);
  w.text("dims");
  w.integers(std::vector<Index>{1, 2, 3, 4});
  w.text("size");
  w.shared_global("torch", "Size");
  w.integers({});
  w.tuple_of_last(1);
  w.reduce();
  w.text("again");
  w.shared_global("torch", "Size");
  w.shared_text("twice");
  w.shared_text("twice");
  w.set_items();
  const Document document = parsed(std::move(w).finish());
  const Value root = document.root();
  const Value list = *root.find("ints");
  ASSERT_EQ(list.size(), ints.size());
  for (std::size_t i = 0; i < ints.size(); ++i) EXPECT_EQ(list[i].as_int(), ints[i]);
  EXPECT_EQ(root.find("half")->as_float(), 0.5);
  EXPECT_EQ(pickle::print(*root.find("dims")), "(1, 2, 3, 4)");
  EXPECT_EQ(pickle::print(*root.find("size")), "()");
  EXPECT_TRUE(root.find("again")->is_global("torch", "Size"));
}

TEST(PickleWriter, RemembersMoreThan256Values) {
  pickle::PickleWriter w;
  w.empty_list();
  w.mark();
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < 300; ++i) w.shared_text("t" + std::to_string(i));
  w.append_items();
  const Document document = parsed(std::move(w).finish());
  ASSERT_EQ(document.root().size(), 600u);
  EXPECT_EQ(document.root()[599].as_string(), "t299");
  EXPECT_EQ(document.root()[299].identity(), document.root()[599].identity());
}

std::string rewritten(std::string bytes) {
  const Document document = parsed(std::move(bytes));
  pickle::PickleWriter w;
  const Status status = pickle::write_value(w, document.root());
  return status ? std::move(w).finish() : status.error().message();
}

TEST(PickleWriter, WritesValuesThatWereRead) {
  pickle::PickleWriter w;
  w.empty_list();
  w.mark();
  w.none();
  w.boolean(true);
  w.integer(-70000);
  w.big_integer(std::string(9, '\x7f'));
  w.number(0.25);
  w.text("text");
  w.empty_tuple();
  w.integers(std::vector<Index>{1, 2, 3, 4});
  w.empty_dict();
  w.mark();
  w.integer(3);
  w.boolean(false);
  w.set_items();
  w.append_items();
  const std::string bytes = std::move(w).finish();
  EXPECT_EQ(printed(rewritten(bytes)), printed(bytes));
  EXPECT_EQ(printed(rewritten(bytes)),
            "[None, True, -70000, 0x7f7f7f7f7f7f7f7f7f, 0.25, 'text', (), (1, 2, 3, 4), {3: False}]");
  // Protocol 2 has no opcode for some types, so they are written as calls that torch.load(weights_only=True) accepts.
  EXPECT_EQ(printed(rewritten("\x80\x03"
                              "C\x02"
                              "a\xff.")),
            "_codecs.encode('a\xc3\xbf', 'latin1')");
  EXPECT_EQ(printed(rewritten("\x80\x04\x8f(K\x01\x90.")), "__builtin__.set([1])");
}

TEST(PickleWriter, WritesTheCallsThatStandForData) {
  for (const std::string text : {"_codecs.encode('a', 'latin1')", "__builtin__.set([1])", "torch.device('cpu')"}) {
    const std::size_t dot = text.find('.'), open = text.find('(');
    std::string args = "X\x01" + std::string(3, '\0') + "a" + "X\x06" + std::string(3, '\0') + "latin1\x86";
    if (text.find("set") != std::string::npos)
      args =
          "]K\x01"
          "a\x85";
    if (text.find("device") != std::string::npos) args = "X\x03" + std::string(3, '\0') + "cpu\x85";
    EXPECT_EQ(
        printed(rewritten("\x80\x02"
                          "c" +
                          text.substr(0, dot) + "\n" + text.substr(dot + 1, open - dot - 1) + "\n" + args + "R.")),
        text);
  }
  EXPECT_EQ(printed(rewritten("\x80\x02"
                              "ctorch\nbfloat16\n.")),
            "torch.bfloat16");
}

TEST(PickleWriter, WritesDataOnly) {
  EXPECT_EQ(rewritten("\x80\x02"
                      "cos\nsystem\n."),
            "unsupported value: a global os.system");
  std::string deep(100, ']');
  EXPECT_NE(rewritten("\x80\x02" + deep + std::string(99, 'a') + ".").find("nested deeper than 64 levels"),
            std::string::npos);
}

TEST(Pickle, FindsWhereAPickleEnds) {
  const std::string one = data("ck2/.metadata");
  EXPECT_EQ(pickle::length_of(one + "more"), static_cast<Index>(one.size()));
  for (std::size_t n = 0; n < one.size(); ++n)
    EXPECT_EQ(pickle::length_of(std::string_view(one).substr(0, n)), std::nullopt);
  EXPECT_EQ(pickle::length_of("\x80\x02\xff and more"), 3) << "up to an opcode that is not known";
  EXPECT_EQ(pickle::length_of(std::string_view("\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", 10)), std::nullopt);
}

}  // namespace
}  // namespace reshard::pickle_test
