// Tests --memory: work that does not fit is refused before it allocates, and accepted work stays within the limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "formats/dcp/dcp.h"
#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::memory_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr Index kMiB = Index{1} << 20;

// Writes a model of this many tensors with `elements` float32 each, in one file.
std::string many_tensors(const TempDir& dir, Index tensors, Index elements) {
  SafetensorsHeaderWriter header({});
  for (Index i = 0; i < tensors; ++i) {
    const std::string name = "layers." + std::to_string(i / 100) + ".part." + std::to_string(i % 100) + ".weight";
    EXPECT_TRUE(header.add(name, DType::kFloat32, {elements}));
  }
  const auto data_start = header.finish();
  EXPECT_TRUE(data_start);
  std::string path = dir / "source.safetensors";
  write_file(path, SafetensorsHeaderWriter::length_field(*data_start) + header.take() +
                       std::string(static_cast<std::size_t>(4 * elements * tensors), 'x'));
  return path;
}

// Returns the peak memory that a successful conversion reports, in bytes; nothing if it was refused.
std::optional<Index> peak_of(const CommandResult& result) {
  const std::string word = "peak memory ";
  const std::size_t at = result.out.find(word);
  if (at == std::string::npos) return std::nullopt;
  std::string text = result.out.substr(at + word.size());
  text.resize(text.find('\n'));
  std::erase(text, ' ');  // "184 MB"
  const auto bytes = parse_bytes(text);
  return bytes ? std::optional(*bytes) : std::nullopt;
}

CommandResult convert(const std::string& source, const std::string& destination, const std::string& to, Index memory) {
  return reshard_cli({"convert", source, destination, "--to", to, "--threads", "2", "--force", "--family", "none",
                      "--memory", std::to_string(memory / kMiB) + "MiB"});
}

TEST(Memory, AMetadataIsReadAsItIsNeededAndMayBeLongerThanIt) {
  if (kSanitized) GTEST_SKIP() << "what the sanitizers take comes on top";
  const TempDir dir;
  const CommandResult made = reshard_cli(
      {"synth", dir / "big", "--model", "llama3-8b", "--mesh", "dp_shard=512,tp=8", "--metadata-only", "-q"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  ASSERT_GT(read_file(dir / "big/.metadata").size(), std::size_t{76} << 20);
  const auto plan = [&](const std::string& memory) {
    return reshard_cli({"plan", dir / "big", "--to", "hf", "--memory", memory, "--threads", "1"});
  };
  const CommandResult enough = plan("76MiB"), little = plan("48MiB");
  EXPECT_EQ(enough.exit_code, 0) << enough.err;
  EXPECT_EQ(little.exit_code, 2);
  EXPECT_THAT(little.err, AllOf(HasSubstr("big/.metadata: --memory 50.3 MB is too small; expected at least"),
                                HasSubstr("in use already")));
}

TEST(Memory, AJobThatIsLetThroughStaysWithinIt) {
  const TempDir dir;
  const CommandResult small = convert(many_tensors(dir, 1, 4), dir / "small", "hf", 4096 * kMiB);
  ASSERT_EQ(small.exit_code, 0) << small.err;
  const Index program = peak_of(small).value_or(0);  // peak memory of a tiny conversion
  ASSERT_GT(program, 0) << small.out;
  for (const Index tensors : every_nth(2) == 1 ? std::vector<Index>{5'000, 20'000} : std::vector<Index>{1'000}) {
    const std::string source = many_tensors(dir, tensors, 4);
    for (const std::string to : {"hf", "dcp"}) {
      bool was_done = false;
      for (Index memory = program + 8 * kMiB; memory < program + 512 * kMiB; memory += memory / 2) {
        const CommandResult result = convert(source, dir / to, to, memory);
        SCOPED_TRACE(to + " of " + std::to_string(tensors) + " tensors, " + std::to_string(memory) + ": " + result.err);
        if (result.exit_code != 0) {
          EXPECT_FALSE(was_done) << "with less it went well";
          EXPECT_EQ(result.exit_code, 2);
          EXPECT_THAT(result.err, AllOf(HasSubstr("--memory "), HasSubstr("too small"), HasSubstr("at least ")));
          continue;
        }
        was_done = true;
        EXPECT_LE(peak_of(result).value_or(INT64_MAX), memory);
      }
      EXPECT_TRUE(was_done);
    }
  }
}

// More than the program takes by itself, also with sanitizers.
constexpr const char* kLittle = kSanitized ? "130MiB" : "100MiB";
constexpr const char* kTooLittle = kSanitized ? "--memory 136 MB is too small; expected at least "
                                              : "--memory 105 MB is too small; expected at least ";

TEST(Memory, AHeaderOfManyTensorsIsRefusedBeforeTheyAreHeld) {
  const TempDir dir;
  const std::string source = many_tensors(dir, 500'000, 0);
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"plan", source, "--to", "dcp"}, {"verify", source}}) {
    std::vector<std::string> words = command;
    words.insert(words.end(), {"--memory", kLittle});
    const CommandResult result = reshard_cli(words);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_THAT(result.err, AllOf(HasSubstr(source), HasSubstr("safetensors header: "), HasSubstr(" tensors and more"),
                                  HasSubstr(kTooLittle)));
  }
}

TEST(Memory, ALargeObjectIsRefusedBeforeItIsRead) {
  const TempDir dir;
  pickle::PickleWriter w;
  w.text(std::string(static_cast<std::size_t>(96 * kMiB), 'x'));
  LayoutRequest request;
  request.tensors.push_back({"weight", DType::kFloat32, {4}, {}, {}});
  request.blobs.push_back({"large", {}, torch_archive::object_item(std::move(w).finish())});
  auto target = kDcpFormat.lay_out(std::move(request));
  ASSERT_TRUE(target) << target.error().message();
  write_target({{"weight", {DType::kFloat32, {4}, std::string(16, 'x')}}}, **target, dir / "source");
  const std::string source = dir / "source";
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"convert", source, dir / "out", "--to", "dcp"}, {"verify", source}}) {
    std::vector<std::string> words = command;
    words.insert(words.end(), {"--memory", kLittle});
    const CommandResult result = reshard_cli(words);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_THAT(result.err, AllOf(HasSubstr("__0_0.distcp"), HasSubstr("object 'large'"), HasSubstr(kTooLittle)));
    words.back() = "1GiB";
    const CommandResult with_room = reshard_cli(words);
    EXPECT_EQ(with_room.exit_code, 0) << with_room.err;
  }
}

}  // namespace
}  // namespace reshard::memory_test
