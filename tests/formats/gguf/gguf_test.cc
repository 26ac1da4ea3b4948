// Tests files that gguf-py wrote (tests/data/gguf/make.py), and damaged copies of them.
#include "formats/gguf/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::gguf_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string data(const std::string& name) { return test_data("gguf/" + name); }

TEST(Gguf, HeldAgainstTheModelItWasMadeOf) {
  for (const std::string name : {"llama", "qwen2", "qwen3"}) {
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"verify", data(name + ".gguf"), "--against", data(name)},
          {"verify", data(name), "--against", data(name + ".gguf")},
          {"verify", data(name + ".gguf"), "--fail-on", "warning"}}) {
      const CommandResult r = reshard_cli(words);
      EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
    }
  }
  const CommandResult big = reshard_cli({"verify", data("llama-big.gguf"), "--against", data("llama")});
  EXPECT_EQ(big.exit_code, 0) << big.out << big.err;
  EXPECT_EQ(reshard_cli({"verify", data("llama.gguf"), "--against", data("qwen2")}).exit_code, 1);
}

// A changed bit of a tensor is found and reported under the tensor's Hugging Face name.
TEST(Gguf, AChangedValueIsFound) {
  const TempDir dir;
  std::string bytes = must(read_whole_file(data("llama.gguf"), 1 << 20));
  bytes[bytes.size() - 40] ^= 1;
  const std::string changed = dir.write("changed.gguf", bytes);
  const CommandResult r = reshard_cli({"verify", changed, "--against", data("llama")});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(r.out, AllOf(HasSubstr("values differ"), HasSubstr("1 error")));
}

TEST(Gguf, InspectShowsTypesAndTheHeader) {
  const CommandResult plain = reshard_cli({"inspect", data("llama.gguf"), "--json"});
  EXPECT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_THAT(plain.out, AllOf(HasSubstr("GGUF version 3, 1 file"), HasSubstr("F32 5 tensors, BF16 16 tensors"),
                               HasSubstr("made from the header")));
  const CommandResult shown = reshard_cli({"inspect", data("llama-q8.gguf"), "--filter", "*ffn_down*"});
  EXPECT_THAT(shown.out, AllOf(HasSubstr("blk.0.ffn_down.weight:Q8_0"), HasSubstr("uint8"), HasSubstr("[32, 68]")));
  // The bytes of quantized blocks are not parameters.
  const std::string count = reshard_cli({"inspect", data("llama.gguf")}).out;
  const std::size_t begin = count.find("weights     ") + 12, end = count.find(" parameters", begin);
  EXPECT_THAT(shown.out, AllOf(HasSubstr("weights     " + count.substr(begin, end - begin) + " parameters: F32 "),
                               HasSubstr(" stored elements")));
}

// Quantized blocks are opaque bytes: verify reports no wrong shapes or missing tensors for them, and they are not
// converted.
TEST(Gguf, QuantizedBlocksArePackedWeights) {
  const CommandResult r = reshard_cli({"verify", data("llama-q8.gguf")});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  EXPECT_THAT(r.out, HasSubstr("2 weights packed as quantized blocks of GGUF"));
  const CommandResult against = reshard_cli({"verify", data("llama-q8.gguf"), "--against", data("llama")});
  EXPECT_THAT(against.out, AllOf(HasSubstr("19 of 19 tensors"), HasSubstr("'blk.0.ffn_down.weight:Q8_0' is only in")));
  const TempDir dir;
  const CommandResult converted = reshard_cli({"convert", data("llama-q8.gguf"), dir / "out", "--to", "hf"});
  EXPECT_EQ(converted.exit_code, 4);
  EXPECT_THAT(converted.err, AllOf(HasSubstr("'blk.0.ffn_down.weight' is packed as quantized blocks of GGUF"),
                                   HasSubstr("this quantization is not unpacked")));
}

TEST(Gguf, TheConfigOfTheHeaderIsThatOfTheModel) {
  for (const std::string name : {"llama", "qwen2", "qwen3"}) {
    const File file = must(File::open(data(name + ".gguf")));
    const gguf::Header header = must(gguf::read_header(file));
    Catalog catalog;
    for (const gguf::TensorInfo& info : header.tensors) {
      Tensor tensor;
      tensor.name = info.name;
      tensor.dtype = info.type->dtype;
      tensor.shape = info.shape;
      must(catalog.add(std::move(tensor)));
    }
    const gguf::MadeConfig made = gguf::make_config(header, catalog);
    ASSERT_TRUE(made.config) << made.why_not;
    const Json own = must(parse_json(must(read_whole_file(data(name + "/config.json"), 1 << 20)), "config.json"));
    for (const char* const key :
         {"architectures", "hidden_size", "intermediate_size", "model_type", "num_attention_heads", "num_hidden_layers",
          "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size", "max_position_embeddings"}) {
      ASSERT_NE(made.config->find(key), nullptr) << name << " " << key;
      EXPECT_EQ(to_text(*made.config->find(key)), to_text(*own.find(key))) << name << " " << key;
    }
  }
}

template <class T>
void append(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void append_text(std::string& to, std::string_view text) {
  append(to, std::uint64_t{text.size()});
  to += text;
}

// Returns a Llama's file with these numbers, after "llama.", and an embedding.
std::string llama_with(const std::vector<std::pair<std::string, std::uint64_t>>& numbers) {
  constexpr std::uint32_t kVersion = 3, kText = 8, kUint64 = 10, kFloat32 = 0;
  std::string out = "GGUF";
  append(out, kVersion);
  append(out, std::uint64_t{1});  // tensors
  append(out, std::uint64_t{numbers.size() + 1});
  append_text(out, "general.architecture");
  append(out, kText);
  append_text(out, "llama");
  for (const auto& [key, number] : numbers) {
    append_text(out, "llama." + key);
    append(out, kUint64);
    append(out, number);
  }
  append_text(out, "token_embd.weight");
  append(out, std::uint32_t{2});
  for (const std::uint64_t n : {32, 4}) append(out, n);
  append(out, kFloat32);
  append(out, std::uint64_t{0});  // offset
  out.resize((out.size() + 31) / 32 * 32 + 32 * 4 * sizeof(float));
  return out;
}

TEST(Gguf, ANumberOf2To63OrMoreGivesNoConfig) {
  constexpr std::uint64_t kLarge = std::uint64_t{1} << 63;
  const TempDir dir;
  for (const bool is_experts : {false, true}) {
    std::vector<std::pair<std::string, std::uint64_t>> numbers = {{"block_count", 1},
                                                                  {"embedding_length", 32},
                                                                  {"feed_forward_length", 64},
                                                                  {"attention.head_count", is_experts ? 4 : kLarge}};
    if (is_experts) numbers.emplace_back("expert_count", kLarge);
    const gguf::Header header = must(gguf::read_header(must(File::open(dir.write("large.gguf", llama_with(numbers))))));
    const gguf::MadeConfig made = gguf::make_config(header, {});
    EXPECT_FALSE(made.config);
    EXPECT_EQ(made.why_not, is_experts ? "it has experts" : "llama.attention.head_count is no number below 2^63");
    EXPECT_EQ(reshard_cli({"inspect", dir / "large.gguf"}).exit_code, 0);
  }
}

TEST(Gguf, TheErrorOfToNamesTheTwoCommands) {
  const TempDir dir;
  const CommandResult r = reshard_cli({"convert", data("llama"), dir / "out", "--to", "gguf"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("reshard convert SRC MODEL --to hf; python convert_hf_to_gguf.py MODEL"));
}

TEST(Gguf, ADirectoryIsItsOneModel) {
  const TempDir dir;
  fs::create_directory(dir / "one");
  fs::copy_file(data("llama.gguf"), dir / "one/model.gguf");
  EXPECT_EQ(reshard_cli({"verify", dir / "one", "--against", data("llama")}).exit_code, 0);
  fs::copy_file(data("qwen2.gguf"), dir / "one/other.gguf");
  const CommandResult r = reshard_cli({"inspect", dir / "one"});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_THAT(r.err, HasSubstr("a directory of several models; name one of them: model.gguf, other.gguf"));
  fs::copy_file(data("qwen2.gguf"), dir / "part-00002-of-00003.gguf");
  const CommandResult part = reshard_cli({"inspect", dir / "part-00002-of-00003.gguf"});
  EXPECT_EQ(part.exit_code, 5);
  EXPECT_THAT(part.err, HasSubstr("expected 3 files like part-00002-of-00003.gguf, got 1"));
}

TEST(Gguf, NamesOfPartsOfAModel) {
  const gguf::SplitName part = gguf::parse_split_name("a-b-00002-of-00003.gguf");
  EXPECT_EQ(part.stem, "a-b");
  EXPECT_EQ(part.number, 2);
  EXPECT_EQ(part.count, 3);
  for (const char* const name : {"a-00004-of-00003.gguf", "a-of-3.gguf", "7.gguf", "-of-.gguf"})
    EXPECT_EQ(gguf::parse_split_name(name).count, 1) << name;
}

// If the header is truncated or one of its bytes changed, the file is read or refused, and never beyond its end.
TEST(Gguf, DamageOfTheHeaderIsAnError) {
  const TempDir dir;
  const std::string bytes = must(read_whole_file(data("qwen3.gguf"), 1 << 20));
  Index end = 0;
  {
    const gguf::Header header = must(gguf::read_header(must(File::open(data("qwen3.gguf")))));
    end = header.tensors.front().offset;
    for (const gguf::TensorInfo& info : header.tensors) end = std::min(end, info.offset);
  }
  for (Index cut = 0; cut + 64 < end; cut += 37) {
    const File file = must(File::open(dir.write("cut.gguf", bytes.substr(0, static_cast<std::size_t>(cut)))));
    const auto header = gguf::read_header(file);
    ASSERT_FALSE(header) << cut;
    EXPECT_EQ(header.error().code(), ErrorCode::kCorrupt) << header.error().message();
  }
  for (Index at = 0; at < end; at += 11) {
    std::string changed = bytes;
    changed[static_cast<std::size_t>(at)] = static_cast<char>(0xff);
    const auto header = gguf::read_header(must(File::open(dir.write("changed.gguf", changed))));
    if (header)
      for (const gguf::TensorInfo& info : header->tensors) EXPECT_GE(info.bytes, 0);
    else
      EXPECT_THAT(header.error().message(), HasSubstr("changed.gguf@"));
  }
}

}  // namespace
}  // namespace reshard::gguf_test
