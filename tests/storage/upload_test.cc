// SPDX-License-Identifier: Apache-2.0
// Tests outputs in a bucket: runs the program against a stand-in for S3 (stand_in.py), without and with faults.
#include "lib/output/upload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <regex>
#include <sstream>

#include "lib/base/storage/object_writer.h"
#include "lib/base/storage/sha256.h"
#include "tests/support/mpirun.h"
#include "tests/support/soak.h"
#include "tests/support/stand_in_server.h"
#include "tests/support/temp_dir.h"

namespace reshard::upload_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kSample = RESHARD_SOURCE_DIR "/samples/checkpoints/fsdp8";
const std::vector<std::string> kSigned = {"AWS_ACCESS_KEY_ID=test:tester", "AWS_SECRET_ACCESS_KEY=s3cr3t/+key"};

// Returns the files below a directory, by name.
std::map<std::string, std::string> files_in(const std::string& directory) {
  std::map<std::string, std::string> out;
  if (!fs::is_directory(directory)) return out;
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

Index count_in(const std::string& log, const std::string& pattern) {
  const std::regex regex(pattern);
  return std::distance(std::sregex_iterator(log.begin(), log.end(), regex), std::sregex_iterator());
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
  const std::string delta = directory_ / "delta.h5";
  ASSERT_EQ(reshard_cli({"delta", source, kSample + "/hf.safetensors", delta}).exit_code, 0);
  expect_as_on_disk(server, {"patch", source, delta}, {"--to", "hf"}, "patched");
}

// Google's XML interface takes the same requests, signed with an HMAC key or with a token.
TEST_F(Uploads, GoToGoogleWithAKeyOrAToken) {
  const std::string source = kSample + "/checkpoint";
  ASSERT_EQ(reshard_cli({"convert", source, directory_ / "here", "--to", "dcp", "--mesh", "tp=2"}).exit_code, 0);
  const struct {
    std::string key;
    std::vector<std::string> server, variables;
    std::string says;  // in the headers of each request
  } kCases[] = {{"key",
                 {"--key", "test:tester:s3cr3t/+key"},
                 {"GS_ACCESS_KEY_ID=test:tester", "GS_SECRET_ACCESS_KEY=s3cr3t/+key"},
                 "/auto/s3/aws4_request"},
                {"token", {}, {"GOOGLE_OAUTH_ACCESS_TOKEN=t0ken"}, "Bearer t0ken"}};
  for (const auto& [key, options, variables, says] : kCases) {
    SCOPED_TRACE(key);
    const StandInServer server(served(), options);
    const CommandResult written =
        server.run({"convert", source, "gs://bucket/" + key, "--to", "dcp", "--mesh", "tp=2"}, variables);
    ASSERT_EQ(written.exit_code, 0) << written.err;
    const std::string log = server.take_requests();
    std::size_t requests = 0, signed_requests = 0;
    for (std::size_t at = 0; (at = log.find("\"authorization\"", at)) != std::string::npos; ++at) ++requests;
    for (std::size_t at = 0; (at = log.find(says, at)) != std::string::npos; ++at) ++signed_requests;
    EXPECT_GT(requests, 5U);
    EXPECT_EQ(signed_requests, requests);
    expect_equal(stored(key), files_in(directory_ / "here"));
    const CommandResult read = server.run({"verify", "gs://bucket/" + key}, variables);
    EXPECT_EQ(read.exit_code, 0) << read.out << read.err;
  }
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

// Ranks divide the parts, or the files of a format with checksums and of a merge. What one process writes, and its
// manifest, does not depend on how often a slab is read.
TEST_F(Uploads, OfSeveralRanksAreTheFilesOfOne) {
  const StandInServer server(served());
  const std::string donor = directory_ / "donor";
  fs::create_directories(directory_ / "here");
  ASSERT_EQ(reshard_cli({"convert", large(), donor, "--to", "hf"}).exit_code, 0);
  const struct {
    std::vector<std::string> before, after;
    std::string to;
  } kCases[] = {{{"convert", large()}, {"--to", "hf"}, "hf"},
                {{"convert", large()}, {"--to", "hf", "--max-shard-size", "3MB"}, "shards"},
                {{"convert", large()}, {"--to", "dcp", "--mesh", "tp=2"}, "dcp"},
                {{"convert", large()}, {"--to", "hdf5"}, "whole.h5"},
                {{"merge", large(), donor}, {"--average", "--to", "hf"}, "merged"},
                {{"merge", large(), donor}, {"--average", "--to", "hdf5"}, "merged.h5"}};
  for (const auto& [before, after, to] : kCases) {
    const auto words = [&, &first = before, &last = after](const std::string& destination) {
      std::vector<std::string> out = first;
      out.push_back(destination);
      out.insert(out.end(), last.begin(), last.end());
      return out;
    };
    ASSERT_EQ(reshard_cli(words(directory_ / ("here/" + to))).exit_code, 0);
    for (const int ranks : {1, 2, 3}) {
      if (ranks > 1 && (!has_mpirun() || (ranks == 3 && to != "hf"))) continue;
      SCOPED_TRACE(to + " on " + std::to_string(ranks));
      const std::string place = std::to_string(ranks) + "/" + to;
      std::vector<std::string> line = words("s3://bucket/" + place);
      if (ranks == 1) line.insert(line.end(), {"--memory", kEnoughMemory, "--threads", "1"});
      const CommandResult got = ranks == 1
                                    ? server.run(line)
                                    : reshard_ranks(ranks, line, directory_ / ("logs-" + std::to_string(ranks) + to),
                                                    "", 60, server.environment())
                                          .command;
      ASSERT_EQ(got.exit_code, 0) << got.out << got.err;
      expect_equal(stored(place), files_in(directory_ / ("here/" + to)));
      EXPECT_TRUE(files_in(bucket())[place] == files_in(directory_ / "here")[to]);
      EXPECT_TRUE(stored(place + ".partial").empty());
    }
  }
}

// A rank that fails ends the job of all and leaves nothing; a rank that is killed leaves what another number of ranks
// resumes.
TEST_F(Uploads, OfRanksEndTogether) {
  if (!has_mpirun()) GTEST_SKIP() << "built without MPI";
  const StandInServer server(served());
  const std::vector<std::string> words = {"convert", large(), "s3://bucket/out", "--to", "hf"};
  server.set_faults(R"([{"fault": "denied", "times": 99, "match": "partNumber=3&"}])");
  const RanksResult refused = reshard_ranks(2, words, directory_ / "refused", "", 60, server.environment(kSigned));
  server.set_faults("[]");
  EXPECT_NE(refused.command.exit_code, 0);
  EXPECT_THAT(refused.err[0], HasSubstr("these credentials may not do this"));
  EXPECT_TRUE(stored("out").empty());
  EXPECT_TRUE(stored("out.partial").empty());
  EXPECT_THAT(server.take_requests(), HasSubstr("\"uploads\": 0"));

  const std::string pid = directory_ / "pid";
  server.set_faults(R"([{"fault": "kill", "times": 1, "match": "partNumber=3&", "method": "PUT", "pid": ")" + pid +
                    R"("}])");
  std::vector<std::string> line = {"/bin/sh", "-c", "echo $$ > '" + pid + "'; exec \"$@\"", "sh", RESHARD_BINARY};
  line.insert(line.end(), words.begin(), words.end());
  EXPECT_NE(program_ranks(2, line, directory_ / "killed", "", 60, server.environment()).command.exit_code, 0);
  server.set_faults("[]");
  EXPECT_TRUE(stored("out").empty());
  std::vector<std::string> again = words;
  again.insert(again.end(), {"--resume", "require"});
  const RanksResult resumed = reshard_ranks(3, again, directory_ / "resumed", "", 60, server.environment());
  EXPECT_EQ(resumed.command.exit_code, 0) << resumed.command.out << resumed.command.err;
  ASSERT_EQ(reshard_cli({"convert", large(), directory_ / "here", "--to", "hf"}).exit_code, 0);
  expect_equal(stored("out"), files_in(directory_ / "here"));
  EXPECT_THAT(server.take_requests(), HasSubstr("\"uploads\": 0"));
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
  for (const auto& [fault, match, method, times, exit_code, says] : sampled(kCases, 4)) {
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

// The largest object fits the limits of S3: 10,000 parts of up to 5 GiB.
TEST(UploadParts, KeepTheLimitsOfTheStore) {
  for (const Index size : {Index{0}, Index{1}, Index{8} << 20, (Index{8} << 20) * 10'000, (Index{8} << 20) * 10'000 + 1,
                           Index{1} << 40, kLargestObject - 1, kLargestObject}) {
    const Index part = Upload::part_bytes({{"large", size, true}, {"small", 1, true}});
    EXPECT_GE(part, kLeastPart) << size;
    EXPECT_LE(part, kLargestPart) << size;
    EXPECT_LE(ceil_div(size, part), kMostParts) << size;
  }
}

// The server ends at any of these requests and starts again without the uploads, as some stores do that are restored.
TEST_F(Uploads, StartAgainAfterTheServerHas) {
  const std::string source = kSample + "/checkpoint";
  const std::vector<std::string> line = {"convert", source, "s3://bucket/out", "--to", "hf"};
  ASSERT_EQ(reshard_cli({"convert", source, directory_ / "here", "--to", "hf"}).exit_code, 0);
  const struct {
    std::string match, method;
    int after;
  } kTimes[] = {{"uploads", "POST", 0}, {"partNumber", "PUT", 0}, {"uploadId", "POST", 0}, {"manifest", "PUT", 0}};
  for (const auto& [match, method, after] : kTimes) {
    SCOPED_TRACE(method + " " + match + " " + std::to_string(after));
    {
      const StandInServer server(served());
      server.set_faults(R"([{"fault": "crash", "times": 1, "match": ")" + match + R"(", "method": ")" + method +
                        R"(", "after": )" + std::to_string(after) + "}]");
      const CommandResult got = server.run(line, {"RESHARD_HTTP_TRIES=1"});
      EXPECT_EQ(got.exit_code, 5) << got.out << got.err;
    }
    const StandInServer server(served());
    const CommandResult second = server.run(line);
    EXPECT_EQ(second.exit_code, 0) << second.out << second.err;
    expect_equal(stored("out"), files_in(directory_ / "here"));
    EXPECT_TRUE(stored("out.partial").empty());
    fs::remove_all(bucket() + "/out");
  }
}

// Random faults at random requests: the run ends well, or with an error after which the same command ends well. Nothing
// incomplete has the final name meanwhile, unless the error says so.
TEST_F(Uploads, SurviveFaultsOfAnyKindAtAnyTime) {
  const char* const given = std::getenv("RESHARD_ROUNDS");
  const int rounds = given ? std::stoi(given) : in_soak() ? 1000 : 3;
  const StandInServer server(served(), {"--key", "test:tester:s3cr3t/+key"});
  const std::vector<std::string> sources = {kSample + "/checkpoint", large(), "s3://bucket/source"};
  const std::vector<std::string> targets = {"hf", "dcp", "bin"};
  fs::copy(kSample + "/checkpoint", bucket() + "/source", fs::copy_options::recursive);
  fs::copy(kSample + "/config.json", bucket() + "/config.json");
  std::map<std::string, std::map<std::string, std::string>> wanted;
  std::mt19937 random(20261126);
  const auto pick = [&](const auto& from) { return from[random() % std::size(from)]; };
  for (int round = 0; round < rounds; ++round) {
    const std::string source = pick(sources), to = pick(targets);
    auto& files = wanted[source + " " + to];
    if (files.empty()) {
      const std::string here = directory_ / ("here-" + std::to_string(round));
      const CommandResult made = server.run({"convert", source, here, "--to", to}, kSigned);
      ASSERT_EQ(made.exit_code, 0) << made.err;
      files = files_in(here);
    }
    std::string faults;
    for (unsigned long i = 0, n = 1 + random() % 3; i < n; ++i) {
      const std::vector<std::string> names = {"500",    "slow-down",  "reset",     "short",         "error-200",
                                              "denied", "lost-reply", "lost-part", "expired-token", "region"};
      const std::vector<std::string> methods = {"GET", "PUT", "POST", "DELETE"};
      faults += std::string(i > 0 ? ", " : "") + R"({"fault": ")" + pick(names) + R"(", "method": ")" + pick(methods) +
                R"(", "times": )" + std::to_string(1 + random() % 5) + R"(, "after": )" +
                std::to_string(random() % 12) + "}";
    }
    SCOPED_TRACE("round " + std::to_string(round) + ": " + source + " --to " + to + " with " + faults);
    server.set_faults("[" + faults + "]");
    const std::vector<std::string> line = {"convert", source, "s3://bucket/out", "--to", to};
    std::vector<std::string> variables = kSigned;
    variables.emplace_back("RESHARD_HTTP_TRIES=2");
    const CommandResult first = server.run(line, variables);
    server.set_faults("[]");
    const bool says_so = first.err.find("to complete it") != std::string::npos ||
                         first.err.find("the new checkpoint is complete") != std::string::npos;
    if (first.exit_code != 0 && !says_so && !first.timed_out) {
      EXPECT_EQ(names_of(stored("out")), std::vector<std::string>()) << first.err;
    }
    if (first.exit_code != 0 && stored("out").size() != files.size()) {
      const CommandResult second = server.run(line, kSigned);
      EXPECT_EQ(second.exit_code, 0) << first.err << second.out << second.err;
    }
    const auto names = names_of(stored("out"));
    if (source != "s3://bucket/source") {
      expect_equal(stored("out"), files);
    } else {
      EXPECT_EQ(names, names_of(files));  // ETags and times of the source are in its manifest
    }
    if (testing::Test::HasFailure()) FAIL() << first.out << first.err;
    fs::remove_all(bucket() + "/out");
    fs::remove_all(bucket() + "/out.partial");
  }
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
  for (const auto& [match, method, after, keeps_parts] : sampled(kTimes, 3)) {
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

// With --state the bucket has nothing but uploads and the finished output. Each destination has a journal of its own.
TEST_F(Uploads, KeepTheirJournalInADirectoryOnRequest) {
  const StandInServer server(served());
  const std::string state = directory_ / "state";
  ASSERT_EQ(reshard_cli({"convert", large(), directory_ / "here", "--to", "hf"}).exit_code, 0);
  const auto line = [&](const std::string& to) {
    return std::vector<std::string>{"convert",   large(), "s3://bucket/" + to, "--to", "hf", "--memory", kLittleMemory,
                                    "--threads", "2",     "--state",           state};
  };
  for (const char* to : {"a", "b"}) {
    kill_at(server, "uploadId", "POST", 0, line(to));
    EXPECT_TRUE(files_in(bucket()).empty());
  }
  EXPECT_EQ(files_in(state).size(), 2u);
  for (const char* to : {"b", "a"}) {
    const CommandResult resumed = server.run(line(to));
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_THAT(resumed.out, HasSubstr("parts already uploaded"));
    EXPECT_EQ(count_in(server.take_requests(), "partNumber="), 0);
    expect_equal(stored(to), files_in(directory_ / "here"));
  }
  EXPECT_TRUE(files_in(state).empty());
  const CommandResult made =
      server.run({"synth", "s3://bucket/synth", "--model", "llama3-tiny", "--state", state}, {"RESHARD_HTTP_TRIES=1"});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  EXPECT_EQ(count_in(server.take_requests(), "[.]partial"), 0);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"convert", kSample + "/checkpoint", directory_ / "out", "--to", "hf"},
        {"synth", directory_ / "out", "--model", "llama3-tiny"}}) {
    std::vector<std::string> with = words;
    with.insert(with.end(), {"--state", state});
    const CommandResult refused = server.run(with);
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.err, HasSubstr("--state is for an output in a bucket"));
  }
  const CommandResult inside = server.run(
      {"convert", kSample + "/checkpoint", "s3://bucket/c", "--to", "hf", "--state", kSample + "/checkpoint/new"});
  EXPECT_EQ(inside.exit_code, 2);
  EXPECT_THAT(inside.err, HasSubstr("which this job reads"));
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

// The memory of a process that holds much already is not divided among uploads.
TEST(UploadMemory, IsAPartOfWhatIsLeft) {
  constexpr Index kMib = Index{1} << 20, kPart = 8 * kMib;
  for (const Index left : {-5 * kMib, 0 * kMib, 40 * kMib, 256 * kMib, 4096 * kMib}) {
    const Upload::Memory memory = Upload::plan_memory(left, kPart, true);
    EXPECT_GE(memory.workers, 1);
    EXPECT_LE(memory.workers, 16);
    EXPECT_TRUE(memory.workers == 1 || memory.bytes <= left * 3 / 8) << left;
  }
}

}  // namespace
}  // namespace reshard::upload_test
