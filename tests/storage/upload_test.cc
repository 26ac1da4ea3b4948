// SPDX-License-Identifier: Apache-2.0
// Tests outputs in a bucket: runs the program against a stand-in for S3 (stand_in.py), without and with faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "lib/base/storage/object_writer.h"
#include "lib/base/storage/sha256.h"
#include "tests/support/soak.h"
#include "tests/support/stand_in_server.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kSample = RESHARD_SOURCE_DIR "/samples/checkpoints/fsdp8";
const std::vector<std::string> kSigned = {"AWS_ACCESS_KEY_ID=test:tester", "AWS_SECRET_ACCESS_KEY=s3cr3t/+key"};

// Returns the files below a directory, by name.
std::map<std::string, std::string> files_in(const std::string& directory) {
  std::map<std::string, std::string> out;
  if (!fs::exists(directory)) return out;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    std::ostringstream text;
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    out[fs::relative(entry.path(), directory).string()] = std::move(text).str();
  }
  return out;
}

std::vector<std::string> names_of(const std::map<std::string, std::string>& files) {
  std::vector<std::string> out;
  for (const auto& [name, text] : files) out.push_back(name);
  return out;
}

// The sanitizers' memory is added.
constexpr const char* kEnoughMemory = kSanitized ? "400MB" : "100MB";
constexpr const char* kLittleMemory = kSanitized ? "300MB" : "70MB";

// Compares the texts one by one, so that a failure shows names and not megabytes.
void expect_equal(const std::map<std::string, std::string>& got, const std::map<std::string, std::string>& wanted) {
  EXPECT_EQ(names_of(got), names_of(wanted));
  for (const auto& [name, text] : wanted) {
    const auto at = got.find(name);
    EXPECT_TRUE(at == got.end() || at->second == text) << name;
  }
}

class Uploads : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(bucket()); }
  std::string bucket() const { return directory_ / "served/bucket"; }
  std::string served() const { return directory_ / "served"; }
  std::map<std::string, std::string> stored(const std::string& key) const { return files_in(bucket() + "/" + key); }

  // Makes a model of 20 MB, whose files take several parts.
  std::string large() const {
    const std::string path = directory_ / "large";
    if (fs::exists(path)) return path;
    const std::string config = directory_.write(
        "config.json",
        R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "vocab_size": 8192,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": false})");
    const CommandResult made =
        reshard_cli({"synth", path, "--config", config, "--dtype", "float32", "--mesh", "tp=2", "--quiet"});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return path;
  }

  // Compares an output in the bucket with that of the same command on disk, and runs verify on it.
  void expect_as_on_disk(const StandInServer& server, const std::vector<std::string>& before,
                         const std::vector<std::string>& after, const std::string& key) {
    const auto words = [&](const std::string& to) {
      std::vector<std::string> out = before;
      out.push_back(to);
      out.insert(out.end(), after.begin(), after.end());
      return out;
    };
    const std::string name = "local-" + std::to_string(made_++), local = directory_ / name;
    const CommandResult here = reshard_cli(words(local));
    ASSERT_EQ(here.exit_code, 0) << here.err;
    const CommandResult there = server.run(words("s3://bucket/" + key), kSigned);
    ASSERT_EQ(there.exit_code, 0) << there.out << there.err;
    if (fs::is_directory(local))
      expect_equal(stored(key), files_in(local));
    else
      EXPECT_TRUE(files_in(bucket())[key] == files_in(directory_.path())[name]);
    EXPECT_TRUE(stored(key + ".partial").empty());
    if (!fs::is_directory(local)) return;  // libhdf5 reads local files only
    const CommandResult read = server.run({"verify", "s3://bucket/" + key}, kSigned);
    EXPECT_EQ(read.exit_code, 0) << read.out << read.err;
  }

  // Runs a command that the server kills at the N-th of these requests.
  void kill_at(const StandInServer& server, const std::string& match, const std::string& method, int after,
               const std::vector<std::string>& words) const {
    const std::string pid = directory_ / "pid";
    server.set_faults(R"([{"fault": "kill", "times": 1, "match": ")" + match + R"(", "method": ")" + method +
                      R"(", "after": )" + std::to_string(after) + R"(, "pid": ")" + pid + R"("}])");
    std::vector<std::string> line = {"/bin/sh", "-c", "echo $$ > '" + pid + "'; exec \"$@\"", "sh", RESHARD_BINARY};
    line.insert(line.end(), words.begin(), words.end());
    EXPECT_EQ(run_command(line, 60, server.environment()).exit_code, 128 + 9);
    server.set_faults("[]");
    (void)server.take_requests();
  }

  int made_ = 0;
  TempDir directory_;
};

TEST_F(Uploads, AreTheFilesThatAreWrittenToDisk) {
  const StandInServer server(served(), {"--key", "test:tester:s3cr3t/+key"});
  const std::string source = kSample + "/checkpoint";
  expect_as_on_disk(server, {"convert", source}, {"--to", "hf"}, "hf");
  expect_as_on_disk(server, {"convert", source}, {"--to", "hf", "--dtype", "bfloat16", "--max-shard-size", "100kB"},
                    "run a+b/step=5/\xc3\xa9t\xc3\xa9 #1");
  expect_as_on_disk(server, {"convert", source}, {"--to", "dcp", "--mesh", "tp=2,dp_shard=2"}, "dcp");
  expect_as_on_disk(server, {"convert", source}, {"--to", "bin"}, "bin");
  expect_as_on_disk(server, {"convert", source}, {"--to", "hdf5"}, "archive.h5");
  expect_as_on_disk(server, {"merge", source, kSample + "/hf.safetensors"}, {"--average", "--to", "hf"}, "merged");
  expect_as_on_disk(server, {"synth"}, {"--model", "llama3-tiny", "--mesh", "tp=2"}, "synth");
}

TEST_F(Uploads, InManyPartsAreTheSameBytes) {
  const StandInServer server(served(), {"--key", "test:tester:s3cr3t/+key"});
  expect_as_on_disk(server, {"convert", large()}, {"--to", "hf"}, "hf");
  expect_as_on_disk(server, {"convert", large()}, {"--to", "dcp"}, "dcp");
  // Converts from the bucket to the bucket with little memory.
  const CommandResult copied = server.run(
      {"convert", "s3://bucket/dcp", "s3://bucket/copy", "--to", "hf", "--memory", kEnoughMemory, "--threads", "2"},
      kSigned);
  EXPECT_EQ(copied.exit_code, 0) << copied.err;
  EXPECT_TRUE(stored("copy")["model.safetensors"] == stored("hf")["model.safetensors"]);
}

// Temporary faults leave no trace. Others give an error and leave no object, upload or journal.
TEST_F(Uploads, GetOverFaultsOrLeaveNothing) {
  const StandInServer server(served());
  const std::string source = kSample + "/checkpoint";
  const struct {
    std::string fault, match, method;
    int times, exit_code;
    std::string says;
  } kCases[] = {{"500", "partNumber", "PUT", 2, 0, ""},
                {"slow-down", "partNumber", "PUT", 2, 0, ""},
                {"reset", "partNumber", "PUT", 2, 0, ""},
                {"lost-reply", "partNumber", "PUT", 1, 0, ""},
                {"500", "uploads", "POST", 1, 0, ""},
                {"lost-reply", "uploadId", "POST", 1, 0, ""},
                {"error-200", "uploadId", "POST", 1, 0, ""},
                {"reset", "config.json", "PUT", 1, 0, ""},
                {"lost-reply", "manifest", "PUT", 1, 0, ""},
                {"500", ".partial", "PUT", 1, 0, ""},
                {"region", "uploads", "POST", 1, 0, ""},
                {"500", "partNumber", "PUT", 99, 5, "the server failed or is overloaded"},
                {"corrupt", "partNumber", "PUT", 1, 5, "the server has other bytes than were sent"},
                {"lost-part", "partNumber", "PUT", 1, 5, "InvalidPart"},
                {"denied", "uploads", "POST", 99, 5, "these credentials may not do this"},
                {"denied", ".partial", "PUT", 99, 5, "these credentials may not do this"},
                {"expired-token", "partNumber", "PUT", 99, 5, "the session token has expired; get new credentials"},
                {"clock-skew", "uploads", "POST", 99, 5, "this machine's clock is wrong"}};
  for (const auto& [fault, match, method, times, exit_code, says] : kCases) {
    SCOPED_TRACE(fault + " " + method + " " + match);
    (void)server.take_requests();
    server.set_faults(R"([{"fault": ")" + fault + R"(", "times": )" + std::to_string(times) + R"(, "match": ")" +
                      match + R"(", "method": ")" + method + R"("}])");
    const CommandResult got =
        server.run({"convert", source, "s3://bucket/out", "--to", "hf"},
                   {"AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=s3cr3t", "RESHARD_HTTP_TRIES=3"});
    server.set_faults("[]");
    EXPECT_EQ(got.exit_code, exit_code) << got.out << got.err;
    EXPECT_THAT(got.err, HasSubstr(says));
    EXPECT_THAT(got.err + got.out, Not(HasSubstr("s3cr3t")));
    const bool is_incomplete = got.err.find("rerun the same command to complete it") != std::string::npos;
    if (is_incomplete) {
      EXPECT_EQ(server.run({"convert", source, "s3://bucket/out", "--to", "hf"}).exit_code, 0);
    }
    if (exit_code == 0 || is_incomplete) {
      const CommandResult read = server.run({"verify", "s3://bucket/out"});
      EXPECT_EQ(read.exit_code, 0) << read.out << read.err;
    } else {
      EXPECT_TRUE(stored("out").empty());
      EXPECT_TRUE(stored("out.partial").empty());
      EXPECT_THAT(server.take_requests(), HasSubstr("\"uploads\": 0"));
    }
    fs::remove_all(bucket() + "/out");
    fs::remove_all(bucket() + "/out.partial");
  }
}

TEST_F(Uploads, NameWhatCouldNotBeAborted) {
  const StandInServer server(served());
  server.set_faults(R"([{"fault": "500", "times": 99, "match": "partNumber"}, {"fault": "denied", "times": 99,
                         "method": "DELETE"}])");
  const CommandResult got =
      server.run({"convert", kSample + "/checkpoint", "s3://bucket/out", "--to", "hf"}, {"RESHARD_HTTP_TRIES=1"});
  EXPECT_EQ(got.exit_code, 5);
  EXPECT_THAT(got.err, HasSubstr("1 upload could not be aborted"));
  EXPECT_THAT(got.err, HasSubstr("s3://bucket/out/model.safetensors (upload upload-"));
}

Index count_in(const std::string& log, const std::string& pattern) {
  const std::regex regex(pattern);
  return std::distance(std::sregex_iterator(log.begin(), log.end(), regex), std::sregex_iterator());
}

// A run that is killed at any of these requests is resumed by the same command.
TEST_F(Uploads, ResumeAfterAKillAtAnyTime) {
  const StandInServer server(served());
  const std::vector<std::string> line = {"convert",  large(),       "s3://bucket/out", "--to", "hf",
                                         "--memory", kLittleMemory, "--threads",       "2"};  // so two parts at a time
  const CommandResult here = reshard_cli({"convert", large(), directory_ / "here", "--to", "hf"});
  ASSERT_EQ(here.exit_code, 0) << here.err;
  const auto wanted = files_in(directory_ / "here");
  const struct {
    std::string match, method;
    int after;
    bool keeps_parts;
  } kTimes[] = {{"uploads", "POST", 0, false},     {".partial", "PUT", 0, false}, {"partNumber=1&", "PUT", 0, false},
                {"partNumber=3&", "PUT", 0, true}, {".partial", "PUT", 1, true},  {"uploadId", "POST", 0, true},
                {"config.json", "PUT", 0, false},  {"manifest", "PUT", 0, false}, {".partial", "DELETE", 0, false}};
  for (const auto& [match, method, after, keeps_parts] : kTimes) {
    SCOPED_TRACE(method + " " + match + " " + std::to_string(after));
    kill_at(server, match, method, after, line);
    const CommandResult second = server.run(line);
    EXPECT_EQ(second.exit_code, 0) << second.out << second.err;
    const std::string log = server.take_requests();
    if (keeps_parts) {
      EXPECT_THAT(second.out, HasSubstr("resuming s3://bucket/out"));
      if (match[0] != 'p') {  // the third request may overtake the others
        EXPECT_EQ(count_in(log, "partNumber="), 0);
      }
    }
    expect_equal(stored("out"), wanted);
    EXPECT_TRUE(stored("out.partial").empty());
    fs::remove_all(bucket() + "/out");
  }
}

TEST_F(Uploads, StartOverWhereTheyMayNotResume) {
  const StandInServer server(served());
  const auto leave_half = [&] {
    kill_at(server, "partNumber=3&", "PUT", 0,
            {"convert", large(), "s3://bucket/out", "--to", "hf", "--memory", kLittleMemory, "--threads", "2"});
  };
  leave_half();
  const CommandResult other =
      server.run({"convert", large(), "s3://bucket/out", "--to", "hf", "--dtype", "bfloat16", "--resume", "require"});
  EXPECT_EQ(other.exit_code, 2) << other.out;
  EXPECT_THAT(other.err, HasSubstr("cannot be resumed: its options or its source differ"));
  const CommandResult changed =
      server.run({"convert", large(), "s3://bucket/out", "--to", "hf", "--dtype", "bfloat16"});
  EXPECT_EQ(changed.exit_code, 0) << changed.err;
  EXPECT_THAT(changed.out, HasSubstr("of an interrupted run, and started over"));
  EXPECT_THAT(server.take_requests(), HasSubstr("\"uploads\": 0"));
  fs::remove_all(bucket() + "/out");

  leave_half();
  const CommandResult never = server.run({"convert", large(), "s3://bucket/out", "--to", "hf", "--resume", "never"});
  EXPECT_EQ(never.exit_code, 0) << never.err;
  const std::string log = server.take_requests();
  EXPECT_THAT(log, HasSubstr("\"uploads\": 0"));
  EXPECT_GE(count_in(log, "partNumber="), 3);  // all; the server may log a request of the killed run late
  const CommandResult nothing =
      server.run({"convert", large(), "s3://bucket/more", "--to", "hf", "--resume", "require"});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.err, HasSubstr("nothing to resume"));
}

TEST_F(Uploads, ReplaceOnlyWhatLocalOutputsReplace) {
  const StandInServer server(served());
  const std::string source = kSample + "/checkpoint";
  const auto write = [&](std::vector<std::string> more) {
    std::vector<std::string> words = {"convert", source, "s3://bucket/out"};
    words.insert(words.end(), more.begin(), more.end());
    return server.run(words);
  };
  ASSERT_EQ(write({"--to", "hf", "--max-shard-size", "100kB"}).exit_code, 0);
  const auto old = stored("out");
  const CommandResult refused = write({"--to", "hf"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("s3://bucket/out: the destination exists; --force replaces it"));
  expect_equal(stored("out"), old);

  const CommandResult replaced = write({"--to", "dcp", "--force"});
  EXPECT_EQ(replaced.exit_code, 0) << replaced.err;
  EXPECT_THAT(names_of(stored("out")), testing::Not(testing::Contains("model.safetensors.index.json")));
  EXPECT_EQ(server.run({"verify", "s3://bucket/out"}).exit_code, 0);

  std::ofstream(bucket() + "/out/notes.txt") << "mine";
  const CommandResult foreign = write({"--to", "hf", "--force"});
  EXPECT_EQ(foreign.exit_code, 2);
  EXPECT_THAT(foreign.err, HasSubstr("notes.txt"));
  EXPECT_THAT(names_of(stored("out")), testing::Contains(".metadata"));
  EXPECT_THAT(server.take_requests(), HasSubstr("\"uploads\": 0"));
}

TEST_F(Uploads, RefuseWhatCannotBeWritten) {
  const StandInServer server(served());
  ASSERT_EQ(server.run({"convert", kSample + "/checkpoint", "s3://bucket/run/model", "--to", "hf"}).exit_code, 0);
  (void)server.take_requests();
  const std::string source = kSample + "/checkpoint", model = "s3://bucket/run/model";
  const struct {
    std::vector<std::string> words;
    int exit_code;
    std::string says;
  } kCases[] = {
      {{"convert", source, "hf://org/out", "--to", "hf"}, 2, "expected a local path, s3:// or gs://"},
      {{"convert", source, "https://host/out", "--to", "dcp"}, 2, "expected a local path, s3:// or gs://"},
      {{"synth", "hf://org/out", "--model", "llama3-tiny"}, 2, "expected a local path, s3:// or gs://"},
      {{"convert", source, "s3://bucket", "--to", "hf"}, 2, "expected a directory in the bucket"},
      {{"convert", source, "s3://nobucket/out", "--to", "hf"}, 5, "there is no such bucket"},
      {{"convert", source, "s3://bucket/v.h5", "--to", "hdf5-view"}, 2, "expected a local path, got a URL"},
      {{"mount", source, "s3://bucket/out", "--as", "hf"}, 2, "expected a local path, got a URL"},
      {{"convert", source, "s3://bucket/out", "--to", "hdf5", "--codec", "zstd:3"}, 4, "drop the compression"},
      {{"synth", "s3://bucket/out", "--model", "llama3-tiny", "--headers-only"}, 2, "has no sparse files"},
      {{"convert", model, model, "--to", "hf", "--force"}, 2, "is s3://bucket/run/model, which this job reads"},
      {{"convert", model, "s3://bucket/run", "--to", "hf", "--force"}, 2, "which this job reads"},
      {{"convert", model, model + "/inside", "--to", "hf"}, 2, "is inside s3://bucket/run/model"},
  };
  for (const auto& [words, exit_code, says] : kCases) {
    SCOPED_TRACE(says);
    const CommandResult got = server.run(words, {"RESHARD_HTTP_TRIES=1"});
    EXPECT_EQ(got.exit_code, exit_code) << got.out << got.err;
    EXPECT_THAT(got.err, HasSubstr(says));
  }
  EXPECT_EQ(count_in(server.take_requests(), R"x("method": "(PUT|POST|DELETE)")x"), 0);
}

// RFC 1321, appendix A.5, and lengths around the padding.
TEST(Md5, IsThatOfTheRfc) {
  EXPECT_EQ(to_hex(md5("")), "d41d8cd98f00b204e9800998ecf8427e");
  EXPECT_EQ(to_hex(md5("message digest")), "f96b697d7cb7938d525a2f31aaf161d0");
  EXPECT_EQ(to_hex(md5("12345678901234567890123456789012345678901234567890123456789012345678901234567890")),
            "57edf4a22be3c955ac49da2e2107b67a");
  EXPECT_EQ(to_base64("a") + to_base64("ab") + to_base64("abc"), "YQ==YWI=YWJj");
}

}  // namespace
}  // namespace reshard
