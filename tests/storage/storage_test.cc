// Tests of checkpoints behind URLs: runs the program against a stand-in for S3, the hub and web servers (stand_in.py),
// with and without faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "lib/base/file.h"
#include "tests/support/soak.h"
#include "tests/support/stand_in_server.h"
#include "tests/support/temp_dir.h"

namespace reshard::storage_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kSamples = RESHARD_SOURCE_DIR "/samples/checkpoints";
constexpr const char* kKey = "AWS_ACCESS_KEY_ID=test:tester";
constexpr const char* kSecret = "AWS_SECRET_ACCESS_KEY=s3cr3t/+key";
const std::vector<std::string> kSigned = {kKey, kSecret};

std::string text_of(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

// A directory that stand_in.py serves as bucket, repository and web pages. It contains a DCP checkpoint and a Hugging
// Face model under names that must be percent-encoded.
class Stores : public testing::Test {
 protected:
  static constexpr const char* kRun =
      "run a+b/step=5/\xc3\xa9t\xc3\xa9 #1%20";  // every character that URLs treat specially

  void SetUp() override {
    const fs::path bucket = directory_ / "org/model";
    fs::create_directories(bucket / kRun);
    fs::copy(kSamples + "/fsdp8/checkpoint", bucket / kRun / "dcp", fs::copy_options::recursive);
    fs::create_directories(bucket / "hf");
    fs::copy(kSamples + "/fsdp8/hf.safetensors", bucket / "hf/model.safetensors");
    fs::copy(kSamples + "/fsdp8/config.json", bucket / "hf/config.json");
    fs::copy(kSamples + "/fsdp8/config.json", bucket / kRun / "config.json");
  }

  std::string local(const std::string& path) const { return directory_ / ("org/model/" + path); }
  static std::string in_bucket(const std::string& path) { return "s3://org/model/" + path; }

  TempDir directory_;
};

TEST_F(Stores, AnswerAsFilesDoWhateverTheScheme) {
  const StandInServer server(directory_.path(), {"--key", "test:tester:s3cr3t/+key", "--token", "hf_t"});
  const std::string dcp = std::string(kRun) + "/dcp";
  const struct {
    std::string url;
    std::vector<std::string> variables;
  } kUrls[] = {{"s3://org/model/" + dcp, kSigned},
               {"gs://org/model/" + dcp, {"GS_ACCESS_KEY_ID=test:tester", "GS_SECRET_ACCESS_KEY=s3cr3t/+key"}},
               {"hf://org/model/" + dcp, {"HF_TOKEN=hf_t"}},
               {"hf://org/model@refs/pr/1/" + dcp, {"HF_TOKEN=hf_t"}},
               {server.url() + "/web/org/model/" + dcp, {}}};
  for (const auto& [url, variables] : kUrls) {
    SCOPED_TRACE(url);
    // In an http URL '#' and '%' have a special meaning.
    const bool is_web = url.starts_with("http");
    const std::string path =
        is_web ? std::regex_replace(std::regex_replace(url, std::regex("%20"), "%2520"), std::regex("#"), "%23") : url;
    for (const std::vector<std::string>& words : {std::vector<std::string>{"layout"}, {"diff", "+"}}) {
      std::vector<std::string> here = {words[0], local(dcp)}, there = {words[0], path};
      for (std::size_t i = 1; i < words.size(); ++i)
        for (auto* line : {&here, &there}) line->push_back(words[i] == "+" ? local(dcp) : words[i]);
      const CommandResult wanted = reshard_cli(here), got = server.run(there, variables);
      EXPECT_EQ(got.exit_code, wanted.exit_code) << got.out << got.err;
      if (words[0] == "diff") continue;  // its output contains both paths
      EXPECT_EQ(shortened(got.out, path), shortened(wanted.out, local(dcp))) << got.err;
    }
  }
}

TEST_F(Stores, ConvertToTheSameBytesAsALocalCopy) {
  const StandInServer server(directory_.path(), {"--key", "test:tester:s3cr3t/+key"});
  const std::string dcp = std::string(kRun) + "/dcp", config = std::string(kRun) + "/config.json";
  const CommandResult here =
      reshard_cli({"convert", local(dcp), directory_ / "here", "--to", "hf", "--config", local(config)});
  ASSERT_EQ(here.exit_code, 0) << here.err;
  const CommandResult there = server.run(
      {"convert", in_bucket(dcp), directory_ / "there", "--to", "hf", "--config", in_bucket(config)}, kSigned);
  ASSERT_EQ(there.exit_code, 0) << there.err;
  EXPECT_EQ(text_of(directory_ / "there/model.safetensors"), text_of(directory_ / "here/model.safetensors"));
  EXPECT_EQ(text_of(directory_ / "there/config.json"), text_of(directory_ / "here/config.json"));
  EXPECT_THAT(text_of(directory_ / "there/reshard_manifest.json"), Not(HasSubstr("s3cr3t")));

  const CommandResult back = server.run({"convert", in_bucket("hf"), directory_ / "back", "--to", "dcp"}, kSigned);
  EXPECT_EQ(back.exit_code, 0) << back.err;
  const CommandResult compared = server.run({"verify", directory_ / "back", "--against", in_bucket("hf")}, kSigned);
  EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
  const CommandResult difference = server.run({"diff", in_bucket("hf"), in_bucket("hf/model.safetensors")}, kSigned);
  EXPECT_EQ(difference.exit_code, 0) << difference.out << difference.err;
}

TEST_F(Stores, HoldOrbaxCheckpoints) {
  fs::create_directories(local("jax"));
  for (const char* name : {"two_processes", "zarr3", "files"})
    fs::copy(std::string(RESHARD_TEST_DATA "/orbax/") + name, local(std::string("jax/") + name),
             fs::copy_options::recursive);
  const StandInServer server(directory_.path(), {"--key", "test:tester:s3cr3t/+key", "--token", "hf_t"});
  const std::pair<std::string, std::vector<std::string>> kStores[] = {
      {"gs://org/model/jax/two_processes", {"GS_ACCESS_KEY_ID=test:tester", "GS_SECRET_ACCESS_KEY=s3cr3t/+key"}},
      {"s3://org/model/jax/zarr3", kSigned},
      {"hf://org/model/jax/files", {"HF_TOKEN=hf_t"}},
      {server.url() + "/web/org/model/jax/files", {}}};
  for (const auto& [url, variables] : kStores) {
    const std::string copy = local("jax" + url.substr(url.rfind('/')));
    const CommandResult compared = server.run({"diff", url, copy}, variables);
    EXPECT_EQ(compared.exit_code, 0) << url << compared.out << compared.err;
    const CommandResult converted = server.run(
        {"convert", url, directory_ / "out", "--to", "orbax", "--mesh", "dp_shard=2", "--family", "none", "--force"},
        variables);
    EXPECT_EQ(converted.exit_code, 0) << url << converted.err;
    const CommandResult same = reshard_cli({"diff", copy, directory_ / "out"});
    EXPECT_EQ(same.exit_code, 0) << url << same.out << same.err;
  }
}

TEST_F(Stores, ListTheStepsOfARun) {
  fs::create_directories(directory_ / "org/steps");
  for (const char* step : {"step-5", "step-20", "step-100", "a\\b&c-3"})
    fs::copy(kSamples + "/fsdp8/checkpoint", directory_ / ("org/steps/" + std::string(step)),
             fs::copy_options::recursive);
  const StandInServer server(directory_.path());
  const CommandResult latest = server.run({"latest", "s3://org/steps"});
  EXPECT_EQ(latest.exit_code, 0) << latest.err;
  EXPECT_THAT(latest.out, HasSubstr("s3://org/steps/step-100"));
  EXPECT_THAT(server.run({"latest", "s3://org/steps", "--all"}).out, HasSubstr("a\\b&c-3   complete"));
  const CommandResult inspect = server.run({"inspect", "s3://org/steps"});
  EXPECT_EQ(inspect.exit_code, 4);
  EXPECT_THAT(inspect.err, HasSubstr("the newest complete one is s3://org/steps/step-100"));
}

// A temporary fault is retried; a permanent one is an error.
TEST_F(Stores, GetOverFaultsThatPass) {
  const StandInServer server(directory_.path());
  const struct {
    std::string name, match;
    int times;
  } kFaults[] = {{"500", "model.safetensors", 2},
                 {"slow-down", "model.safetensors", 2},
                 {"reset", "model.safetensors", 2},
                 {"short", "model.safetensors", 2},
                 {"stall", "model.safetensors", 1},
                 {"500", "prefix", 1},
                 {"reset", "prefix", 1},
                 {"error-200", "prefix", 1},
                 {"region", "prefix", 1}};
  for (const auto& [name, match, times] : sampled(kFaults, 3)) {
    SCOPED_TRACE(name + " " + match);
    server.set_faults(R"([{"fault": ")" + name + R"(", "times": )" + std::to_string(times) + R"(, "match": ")" + match +
                      R"("}])");
    const CommandResult got = server.run({"verify", in_bucket("hf")}, {"RESHARD_HTTP_TIMEOUT=1"});
    EXPECT_EQ(got.exit_code, 0) << got.out << got.err;
  }
}

// Requests that were sent before the region was known are all sent again. A server that does not name the region is
// asked for the bucket's location.
TEST_F(Stores, AreAskedInTheirRegion) {
  const std::vector<std::string> named = {"--key", "test:tester:s3cr3t/+key", "--region", "eu-central-1", "--delay",
                                          "0.05"};
  std::vector<std::string> mute = named;
  mute.emplace_back("--mute-region");
  for (const auto& options : {named, mute}) {
    const StandInServer server(directory_.path(), options);
    for (const std::string url : {"s3://org/model/hf", "s3://org/model/hf/", "gs://org/model/hf"}) {
      std::vector<std::string> variables = kSigned;
      if (url.starts_with("gs")) variables = {"GS_ACCESS_KEY_ID=test:tester", "GS_SECRET_ACCESS_KEY=s3cr3t/+key"};
      const CommandResult got = server.run({"verify", url}, variables);
      EXPECT_EQ(got.exit_code, 0) << url << got.out << got.err;
    }
    const CommandResult other = server.run({"verify", "s3://org/model/hf"}, {kKey, kSecret, "AWS_REGION=ap-south-1"});
    EXPECT_EQ(other.exit_code, 0) << other.out << other.err;
  }
}

Index requests_in(const std::string& log) {
  return std::count(log.begin(), log.end(), '{') - 1;  // one object per request, inside one outer object
}

// One request fails, each in turn. Then a command fails too, or prints what it prints without the fault: a file that
// cannot be looked up is not a missing one. Otherwise `latest` would name an older step.
TEST_F(Stores, NeverTakeAFailureForAnAnswer) {
  for (const char* step : {"run/step-100", "run/step-200"}) {
    fs::create_directories(directory_ / "org/run");
    fs::copy(kSamples + "/fsdp8/checkpoint", directory_ / ("org/" + std::string(step)), fs::copy_options::recursive);
  }
  fs::copy(RESHARD_TEST_DATA "/orbax/files", directory_ / "org/files", fs::copy_options::recursive);
  const StandInServer server(directory_.path());
  const std::string web = server.url() + "/web/org";
  const std::vector<std::string> kLines[] = {{"inspect", web + "/run/step-100/__0_0.distcp"},
                                             {"latest", web + "/run"},
                                             {"latest", "s3://org/run"},
                                             {"layout", web + "/files"}};
  for (const auto& line : sampled(kLines, 2)) {
    SCOPED_TRACE(testing::PrintToString(line));
    server.set_faults("[]");
    (void)server.take_requests();
    const CommandResult wanted = server.run(line);
    const Index requests = requests_in(server.take_requests());
    const Index step = in_soak() ? 1 : std::max<Index>(1, requests / 6);
    for (Index i = 0; i < requests; i += step) {
      server.set_faults(R"([{"fault": "500", "times": 1, "after": )" + std::to_string(i) + "}]");
      const CommandResult got = server.run(line, {"RESHARD_HTTP_TRIES=1"});
      if (got.exit_code == 5) {
        EXPECT_THAT(got.err, HasSubstr("the server failed or is overloaded")) << i;
        continue;
      }
      EXPECT_EQ(got.exit_code, wanted.exit_code) << i << got.err;
      EXPECT_EQ(got.out, wanted.out) << i;
      EXPECT_EQ(got.err, wanted.err) << i;
    }
  }
}

// A store that denies to list answers a request for a missing object as one for an object that may not be read.
TEST_F(Stores, TellADeniedObjectFromAMissingOne) {
  fs::create_directories(local("run"));
  const StandInServer server(directory_.path());
  server.set_faults(R"([{"fault": "denied", "times": 99, "match": "/org/model/hf/model.safetensors"}])");
  for (const char* name : {"hf/model.safetensors", "hf"}) {
    const CommandResult denied = server.run({"inspect", in_bucket(name)});
    EXPECT_EQ(denied.exit_code, 5) << denied.out;
    EXPECT_THAT(denied.err, HasSubstr("AccessDenied")) << name;
  }
  for (const char* step : {"run/step-1", "run/step-2"})
    fs::copy(kSamples + "/fsdp8/checkpoint", local(step), fs::copy_options::recursive);
  server.set_faults(R"([{"fault": "denied", "times": 99, "match": "/org/model/run/step-2/.metadata"}])");
  const CommandResult latest = server.run({"latest", in_bucket("run")});
  EXPECT_EQ(latest.exit_code, 5) << latest.out;
  EXPECT_THAT(latest.err, HasSubstr("step-2/.metadata"));
  // Many web servers deny every name that begins with a dot.
  server.set_faults(R"([{"fault": "denied", "times": 99, "match": "/web/org/model/hf/."}])");
  const CommandResult web = server.run({"inspect", server.url() + "/web/org/model/hf"});
  EXPECT_EQ(web.exit_code, 0) << web.err;
  server.set_faults(R"([{"fault": "denied", "times": 99, "match": "/org/model/hf/none.safetensors"}])");
  const CommandResult missing = server.run({"inspect", in_bucket("hf/none.safetensors")});
  EXPECT_EQ(missing.exit_code, 5) << missing.out;
  EXPECT_THAT(missing.err, HasSubstr("not found"));
}

TEST_F(Stores, SayWhatToDo) {
  fs::copy(RESHARD_TEST_DATA "/hdf5/odd.h5", local("odd.h5"));
  const StandInServer server(directory_.path(), {"--key", "test:tester:s3cr3t/+key", "--token", "hf_t"});
  const struct {
    std::string url, fault;
    std::vector<std::string> variables;
    std::string says;
  } kCases[] = {
      {"s3://org/model/hf", "", {kKey, "AWS_SECRET_ACCESS_KEY=wrong"}, "the secret key does not match the access key"},
      {"s3://org/model/hf", "", {"AWS_ACCESS_KEY_ID=other", kSecret}, "the server does not know the access key"},
      {"s3://org/model/hf", "", {}, "no credentials were found: set AWS_ACCESS_KEY_ID"},
      {"s3://org/model/hf", "", {kKey}, "belong together"},
      {"s3://org/model/hf", "", {"AWS_PROFILE=nobody"}, "AWS_PROFILE names 'nobody'"},
      {"s3://nobucket/model", "", kSigned, "there is no such bucket"},
      {"s3://org/nothing", "", kSigned, "s3://org/nothing: not found"},
      {"s3://org/model/hf", "expired-token", kSigned, "the session token has expired; get new credentials"},
      {"s3://org/model/hf", "clock-skew", kSigned, "this machine's clock is wrong: the server has"},
      {"s3://org/model/hf", "stall", kSigned, "raise RESHARD_HTTP_TIMEOUT"},
      {"s3://org/model/hf", "500", kSigned, "the server failed or is overloaded; try again later"},
      {"hf://org/model/hf", "", {"HF_TOKEN=other"}, "the token may not read it"},
      {"hf://org/model/hf", "", {}, "it is private: set HF_TOKEN"},
      {"hf://org/none", "", {"HF_TOKEN=hf_t"}, "there is no such repository"},
      {"hf://org/model@v9/hf", "", {"HF_TOKEN=hf_t"}, "the repository has no revision 'v9'"},
      {"s3://org/model/odd.h5", "", kSigned, "libhdf5 reads only local files; download it first"},
      {"hf://org", "", {}, "expected hf://organisation/model"},
      {server.url() + "/web/org/none", "", {}, "not found"},
      {server.url() + "/web/org/model/hf/model.safetensors", "denied", {}, "the server denies access (HTTP 403)"},
      {"https://user:s3cr3t@host/model", "", {}, "a URL with a user or a password"},
      {"http://127.0.0.1:1/model", "", {}, "check the endpoint, the network and the proxy"},
  };
  for (const auto& [url, fault, variables, says] : kCases) {
    SCOPED_TRACE(url + " " + says);
    server.set_faults(fault.empty() ? "[]" : R"([{"fault": ")" + fault + R"(", "times": 99}])");
    std::vector<std::string> all = variables;
    all.insert(all.end(), {"RESHARD_HTTP_TRIES=1", "RESHARD_HTTP_TIMEOUT=1"});
    const CommandResult got = server.run({"inspect", url}, all);
    EXPECT_THAT(got.exit_code, testing::AnyOf(2, 4, 5)) << got.out;
    EXPECT_THAT(got.err, HasSubstr(says));
    EXPECT_THAT(got.err, Not(HasSubstr("s3cr3t")));
    EXPECT_THAT(got.err, Not(HasSubstr("hf_t")));
  }
}

// Returns what a command prints, without times, sizes of memory and disks, and the lines that only URLs have.
std::string without_circumstances(const std::string& text, const std::string& root) {
  std::istringstream lines(shortened(text, root));
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    static const std::regex own(R"x(^(memory|requests|done) |"(seconds|peak_memory|disk_free|requests_\w+)":)x");
    static const std::regex measured(R"x([\d.]+ (ms|s)\b|disk free .*)x");
    if (!std::regex_search(line, own)) out += std::regex_replace(line, measured, "N") + "\n";
  }
  return std::regex_replace(out, std::regex(R"x(\s+)x"), " ");  // a longer path wraps elsewhere
}

// Every command that reads, with every option that names a checkpoint or a config. "@" is the bucket or its local copy,
// OUT an output, DELTA a local file. For mounts see Mount.ShowsACheckpointOfABucket.
TEST_F(Stores, AnswerEveryCommandAsFilesDo) {
  for (const char* step : {"run/step-100", "run/step-200"}) {
    fs::create_directories(directory_ / "org/run");
    fs::copy(kSamples + "/fsdp8/checkpoint", directory_ / ("org/" + std::string(step)), fs::copy_options::recursive);
  }
  fs::copy(kSamples + "/fsdp8/config.json", directory_ / "org/run/config.json");
  const StandInServer server(directory_.path());
  const std::vector<std::vector<std::string>> kLines = {
      {"inspect", "@/run/step-100"},
      {"inspect", "@/model/hf", "--json"},
      {"inspect", "@/run"},
      {"plan", "@/run/step-100", "--to", "hf"},
      {"plan", "@/model/hf", "--to", "dcp", "--mesh", "tp=2", "--json"},
      {"verify", "@/run/step-100", "--config", "@/run/config.json"},
      {"verify", "@/model/hf", "--against", "@/run/step-100", "--json"},
      {"verify", "@/run"},
      {"diff", "@/run/step-100", "@/model/hf"},
      {"check", "--config", "@/run/config.json", "--mesh", "tp=2"},
      {"layout", "@/run/step-100"},
      {"latest", "@/run"},
      {"latest", "@/run", "--json"},
      {"convert", "@/run/step-100", "OUT", "--to", "hf", "--config", "@/model/hf/config.json"},
      {"convert", "@/model/hf", "OUT", "--to", "dcp", "--mesh", "tp=2"},
      {"convert", "@/model/hf", "OUT", "--to", "hf", "--repair", "vocab", "--donor", "@/run/step-100"},
      {"merge", "@/run/step-100", "@/model/hf", "OUT", "--average", "--to", "hf"},
      {"patch", "@/run/step-100", "DELTA", "OUT", "--to", "hf"},
      {"watch", "@/run", "OUT", "--to", "hf", "--once"},
      {"inspect", "@/nothing"},
      {"diff", "@/run/step-100", "@/nothing"}};
  const std::string here = directory_ / "org", there = "s3://org", delta = directory_ / "delta.h5";
  const CommandResult made = reshard_cli({"delta", here + "/run/step-100", here + "/model/hf", delta});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  for (std::size_t i = 0; i < kLines.size(); ++i) {
    SCOPED_TRACE(testing::PrintToString(kLines[i]));
    const std::string out = directory_ / ("out-" + std::to_string(i)), kept = out + "-here";
    const auto words = [&](const std::string& root) {
      std::vector<std::string> line = kLines[i];
      for (std::string& word : line)
        word = word == "OUT" ? out : word == "DELTA" ? delta : word[0] == '@' ? root + word.substr(1) : word;
      return line;
    };
    const CommandResult wanted = reshard_cli(words(here));
    if (fs::exists(out)) fs::rename(out, kept);
    const CommandResult got = server.run(words(there));
    EXPECT_EQ(got.exit_code, wanted.exit_code) << got.out << got.err << wanted.err;
    EXPECT_EQ(without_circumstances(got.out, there), without_circumstances(wanted.out, here)) << got.err;
    EXPECT_EQ(without_circumstances(got.err, there), without_circumstances(wanted.err, here));
    if (!fs::exists(kept)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(kept)) {
      const std::string name = fs::relative(entry.path(), kept).string();
      if (entry.is_regular_file() && !name.ends_with(".json") && name[0] != '.') {
        EXPECT_TRUE(text_of(out + "/" + name) == text_of(entry.path().string())) << name;
      }
    }
  }
}

// Such a key names the object, unless the URL ends in a slash or the object is no checkpoint.
TEST_F(Stores, ReadAKeyThatIsAnObjectAndAPrefix) {
  const struct {
    std::string key, object;  // the object is a copy of this file
    std::string opened;       // the request that shows what was opened
  } kCases[] = {{"both.safetensors", "hf/model.safetensors", "both.safetensors"},
                {"both", "hf/model.safetensors", "both"},
                {"marked", "hf/config.json", "marked/model.safetensors"},
                {"v1.2-text", "hf/config.json", "v1.2-text/model.safetensors"}};
  for (const auto& [key, object, opened] : kCases) {
    fs::copy(local("hf"), local(key));
    fs::copy(local(object), local(key + ".object"));
  }
  const StandInServer server(directory_.path());
  const auto was_read = [&](const std::string& key) {
    return HasSubstr("\"/org/model/" + key + "\", \"method\": \"GET\"");
  };
  for (const auto& [key, object, opened] : kCases) {
    SCOPED_TRACE(key);
    (void)server.take_requests();
    const CommandResult got = server.run({"verify", in_bucket(key)});
    EXPECT_EQ(got.exit_code, 0) << got.out << got.err;
    EXPECT_THAT(server.take_requests(), was_read(opened));
    const CommandResult directory = server.run({"verify", in_bucket(key + "/")});
    EXPECT_EQ(directory.exit_code, 0) << directory.out << directory.err;
    EXPECT_THAT(server.take_requests(), was_read(key + "/model.safetensors"));
    // Both in one process, in both orders: what is known of one must not hide the other.
    for (const auto& [a, b] :
         {std::pair(key, key + "/model.safetensors"), std::pair(key + "/model.safetensors", key)}) {
      const CommandResult same = server.run({"diff", in_bucket(a), in_bucket(b)});
      EXPECT_EQ(same.exit_code, 0) << a << same.out << same.err;
    }
  }
  fs::copy(local("hf"), local("bad.safetensors"));
  directory_.write("org/model/bad.safetensors.object", std::string("\x10\0\0\0\0\0\0\0{not json at all}", 24));
  const CommandResult refused = server.run({"inspect", in_bucket("bad.safetensors")});
  EXPECT_EQ(refused.exit_code, 3) << refused.out;
  EXPECT_THAT(refused.err, HasSubstr("to open the directory with the same key, add a slash: s3://org/model/bad.saf"));
}

// A certificate that the system does not know is refused with what to do, and is accepted if it is named. Proxies are
// used, or not, as their variables say.
TEST_F(Stores, TrustCertificatesAndUseProxiesThatTheEnvironmentNames) {
  const std::string key = directory_ / "key.pem", certificate = directory_ / "cert.pem", pem = directory_ / "both.pem";
  const CommandResult made =
      run_command({"/usr/bin/env", "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                   "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj",
                   "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"},
                  60);
  if (made.exit_code != 0) GTEST_SKIP() << "no openssl to make a certificate: " << made.err;
  directory_.write("both.pem", text_of(key) + text_of(certificate));
  const StandInServer server(directory_.path(), {"--tls", pem});
  const std::string store = "AWS_ENDPOINT_URL_S3=https://localhost:" + text_of(pem + ".port");
  const std::string trusted = "AWS_CA_BUNDLE=" + certificate;
  const auto inspect = [&](std::vector<std::string> variables) {
    for (const char* name : {"AWS_CA_BUNDLE=", "CURL_CA_BUNDLE=", "REQUESTS_CA_BUNDLE=", "SSL_CERT_FILE="})
      variables.insert(variables.begin(), name);  // the test's machine may have some; later ones count
    variables.emplace_back("RESHARD_HTTP_TRIES=1");
    return server.run({"inspect", in_bucket("hf")}, variables);
  };
  const CommandResult refused = inspect({store});
  EXPECT_EQ(refused.exit_code, 5) << refused.out;
  EXPECT_THAT(refused.err, HasSubstr("the server's certificate is not trusted: name its authority's file in"));
  for (const char* name : {"AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"}) {
    const CommandResult got = inspect({store, name + ("=" + certificate)});
    EXPECT_EQ(got.exit_code, 0) << name << got.err;
  }
  const struct {
    std::vector<std::string> variables;
    int exit_code;
    bool is_tunnelled;
  } kCases[] = {
      {{store, trusted, "https_proxy=" + server.url()}, 0, true},
      {{store, trusted, "HTTPS_PROXY=" + server.url()}, 0, true},
      {{store, trusted, "https_proxy=" + server.url(), "no_proxy=localhost"}, 0, false},
      {{store, trusted, "HTTPS_PROXY=http://127.0.0.1:1", "NO_PROXY=localhost"}, 0, false},
      {{store, trusted, "https_proxy=http://127.0.0.1:1"}, 5, false},
      {{"AWS_ENDPOINT_URL_S3=http://store.invalid", "http_proxy=" + server.url()}, 0, false},
      {{"AWS_ENDPOINT_URL_S3=http://store.invalid", "http_proxy=" + server.url(), "no_proxy=.invalid"}, 5, false}};
  for (const auto& [variables, exit_code, is_tunnelled] : kCases) {
    SCOPED_TRACE(testing::PrintToString(variables));
    (void)server.take_requests();
    const CommandResult got = inspect(variables);
    EXPECT_EQ(got.exit_code, exit_code) << got.out << got.err;
    EXPECT_EQ(server.take_requests().find("CONNECT") != std::string::npos, is_tunnelled);
    if (exit_code != 0) {
      EXPECT_THAT(got.err, HasSubstr("proxy"));
    }
  }
}

TEST_F(Stores, ReadFilesOfABucketThatMayNotBeListed) {
  const StandInServer server(directory_.path(), {"--deny-list"});
  const CommandResult directory = server.run({"inspect", in_bucket("hf")});
  EXPECT_EQ(directory.exit_code, 5);
  EXPECT_THAT(directory.err, HasSubstr("or name a file that may be read"));
  const CommandResult file = server.run({"verify", in_bucket("hf/model.safetensors")});
  EXPECT_EQ(file.exit_code, 0) << file.out << file.err;
}

// fake-gcs-server does not say whether a listing is complete, and lists ETags without quotes.
TEST_F(Stores, ListAsServersDoThatLeaveThingsOut) {
  const StandInServer server(directory_.path(), {"--terse-list"});
  const CommandResult got = server.run({"verify", in_bucket(std::string(kRun) + "/dcp")});
  EXPECT_EQ(got.exit_code, 0) << got.out << got.err;
}

TEST_F(Stores, RefuseAnObjectThatIsReplacedMeanwhile) {
  const StandInServer server(directory_.path(), {"--replace", local("hf/model.safetensors")});
  const CommandResult got = server.run({"verify", in_bucket("hf")});
  EXPECT_EQ(got.exit_code, 5) << got.out;
  EXPECT_THAT(got.err, HasSubstr("model.safetensors"));
  EXPECT_THAT(got.err, HasSubstr("the object was replaced after it was opened"));
}

Index number_in(const std::string& log, const std::string& name) {
  const std::size_t at = log.find("\"" + name + "\": ");
  return at == std::string::npos ? -1 : std::stoi(log.substr(at + name.size() + 4));
}

TEST_F(Stores, AreAskedForLittleAndForMuchAtOnce) {
  const StandInServer server(directory_.path(), {"--delay", "0.04"});
  const std::string dcp = in_bucket(std::string(kRun) + "/dcp");
  ASSERT_EQ(server.run({"inspect", dcp}).exit_code, 0);
  // Requests: the type of the path, its listing, .metadata, the config next to it, which is looked up by name, the
  // objects in three files, and two more that are likely after the second.
  EXPECT_LE(requests_in(server.take_requests()), 9);
  ASSERT_EQ(server.run({"inspect", in_bucket("hf")}).exit_code, 0);
  EXPECT_LE(requests_in(server.take_requests()), 4);  // the same, a header, and the config
  ASSERT_EQ(server.run({"verify", dcp}).exit_code, 0);
  const std::string log = server.take_requests();
  EXPECT_GE(number_in(log, "most_open"), 4) << "of eight files";
}

// Opening a checkpoint waits for few round trips, however many files and directories it has. Each bound has room for
// two more than on an idle machine, and for as many again with sanitizers: a late request looks like a later one.
TEST_F(Stores, AreOpenedInFewRoundTrips) {
  const struct {
    std::string name;
    std::vector<std::string> words;
    Index rounds;
  } kCases[] = {{"dcp", {"--to", "dcp", "--mesh", "tp=8"}, 4},
                {"megatron", {"--to", "megatron", "--mesh", "tp=8"}, 6},
                {"megatron-legacy", {"--to", "megatron-legacy", "--mesh", "tp=4,pp=2"}, 14},
                {"ranks", {"--to", "ranks", "--mesh", "tp=8"}, 7},
                {"universal", {"--to", "deepspeed-universal"}, 20},
                {"orbax", {"--to", "orbax", "--mesh", "dp_shard=8"}, 8},
                {"bin", {"--to", "bin"}, 7}};
  fs::create_directories(directory_ / "org/few");
  for (const auto& [name, words, rounds] : kCases) {
    std::vector<std::string> line = {"synth", directory_ / ("org/few/" + name), "--model", "llama3-tiny", "-q"};
    line.insert(line.end(), words.begin(), words.end());
    const CommandResult made = reshard_cli(line);
    ASSERT_EQ(made.exit_code, 0) << made.err;
  }
  const StandInServer server(directory_.path(), {"--delay", "0.1"});
  for (const auto& [name, words, rounds] : kCases) {
    SCOPED_TRACE(name);
    const CommandResult got = server.run({"inspect", "s3://org/few/" + name});
    EXPECT_EQ(got.exit_code, 0) << got.err;
    EXPECT_LE(number_in(server.take_requests(), "rounds"), kSanitized ? 2 * rounds : rounds);
  }
  // Some 25 files that a model may have next to it are looked up by name: in a bucket's directory, which is listed once
  // for them, and on a web server at the same time. 7 and 11 rounds on an idle machine, and 53 if each is looked up
  // alone.
  for (const std::string& source : {std::string("s3://org/few/dcp"), server.url() + "/web/org/few/dcp"}) {
    SCOPED_TRACE(source);
    const CommandResult got = server.run({"convert", source, directory_ / "model", "--to", "hf", "--force"});
    EXPECT_EQ(got.exit_code, 0) << got.err;
    EXPECT_LE(number_in(server.take_requests(), "rounds"), 25);
  }
}

// A file that is read from its beginning to its end in small steps, as the pickle of a .metadata is, is fetched in
// large ranges, many at a time, and each byte once.
TEST_F(Stores, SendAFileThatIsReadInOrderInFewRoundTrips) {
  constexpr Index kSize = (Index{48} << 20) + 5, kStep = Index{1} << 20;
  directory_.write("org/long", "");
  fs::resize_file(directory_ / "org/long", kSize);
  const StandInServer server(directory_.path(), {"--delay", "0.1"});
  ::setenv("AWS_ENDPOINT_URL_S3", server.url().c_str(), 1);
  ::setenv("AWS_EC2_METADATA_DISABLED", "true", 1);
  const auto file = File::open("s3://org/long");
  ::unsetenv("AWS_ENDPOINT_URL_S3");
  ASSERT_TRUE(file) << file.error().message();
  std::vector<std::byte> bytes(kStep);
  for (Index at = 0; at < kSize; at += kStep) {
    const Status read = file->read_at(at, MutableBytes(bytes).first(std::min(kStep, kSize - at)));
    ASSERT_TRUE(read) << read.error().message();
  }
  const std::string log = server.take_requests();
  EXPECT_LE(number_in(log, "rounds"), 5) << log;  // the lookup, and where the window is still small
  EXPECT_LE(requests_in(log), 12) << log;
  Index sent = 0;
  const std::regex range(R"(bytes=(\d+)-(\d+))");
  for (std::sregex_iterator at(log.begin(), log.end(), range), end; at != end; ++at)
    sent += std::stoll((*at)[2]) - std::stoll((*at)[1]) + 1;
  EXPECT_EQ(sent, kSize + 1) << "each byte once, and one for the lookup";
}

// A listing of all levels is used only if it fits in one reply.
TEST_F(Stores, ListDirectoriesOfManyObjects) {
  for (int i = 0; i < 1100; ++i)
    directory_.write("org/model/hf/old/" + std::to_string(i % 50) + "/" + std::to_string(i), "");
  const StandInServer server(directory_.path());
  // Sanitizers take so much of the usual memory that nothing would be read ahead.
  const CommandResult got = server.run({"verify", in_bucket("hf"), "--memory", "1GiB"});
  EXPECT_EQ(got.exit_code, 0) << got.out << got.err;
  EXPECT_LE(requests_in(server.take_requests()), 8);
}

// A server that sends a few bytes a second for ever does not keep a command for ever.
TEST_F(Stores, AreGivenUpWhenBytesTrickle) {
  const StandInServer server(directory_.path());
  server.set_faults(R"([{"fault": "trickle", "times": 99, "match": "model.safetensors"}])");
  const CommandResult got = server.run({"verify", in_bucket("hf")}, {"RESHARD_HTTP_TRIES=1", "RESHARD_HTTP_TIMEOUT=1"});
  EXPECT_EQ(got.exit_code, 5) << got.out;
  EXPECT_THAT(got.err, HasSubstr("model.safetensors"));
  EXPECT_THAT(got.err, HasSubstr("Operation too slow"));
  EXPECT_THAT(got.err, HasSubstr("raise RESHARD_HTTP_TIMEOUT"));
}

TEST_F(Stores, AreNotAskedForLocalPaths) {
  const StandInServer server(directory_.path());
  EXPECT_EQ(server.run({"inspect", local("hf")}).exit_code, 0);
  EXPECT_THAT(server.take_requests(), HasSubstr("\"requests\": []"));
}

// Tries each source of keys when the sources before it have none. The stand-in also plays the services of a machine.
TEST_F(Stores, FindKeysAsTheAwsToolsDo) {
  const StandInServer server(directory_.path(), {"--key", "test:tester:s3cr3t/+key"});
  const std::string token = directory_.write("token", "t0ken\n");
  const std::string keys = R"({"Version": 1, "AccessKeyId": "test:tester", "SecretAccessKey": "s3cr3t/+key"})";
  directory_.write("keys.json", keys);
  const std::string process =
      directory_.write("process", "[default]\ncredential_process = cat " + (directory_ / "keys.json") + "\n");
  const std::string failing = directory_.write("failing", "[default]\ncredential_process = false\n");
  const std::string sso = directory_.write("sso", "[default]\nsso_session = x\n");
  const struct {
    std::vector<std::string> variables;
    std::string says;  // the error; empty: the keys work
  } kCases[] = {
      {{"AWS_CONTAINER_CREDENTIALS_FULL_URI=" + server.url() + "/_role/container",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=" + token},
       ""},
      {{"AWS_CONTAINER_CREDENTIALS_FULL_URI=http://example.org/keys"}, "expected https, or a host of this machine"},
      {{"AWS_CONTAINER_CREDENTIALS_FULL_URI=" + server.url() + "/_role/none"}, "cannot be fetched"},
      {{"AWS_EC2_METADATA_DISABLED=", "AWS_EC2_METADATA_SERVICE_ENDPOINT=" + server.url() + "/_role/"}, ""},
      {{"AWS_WEB_IDENTITY_TOKEN_FILE=" + token, "AWS_ROLE_ARN=arn:aws:iam::1:role/a b",
        "AWS_ENDPOINT_URL_STS=" + server.url() + "/_role/sts"},
       ""},
      {{"AWS_WEB_IDENTITY_TOKEN_FILE=" + token, "AWS_ROLE_ARN=other",
        "AWS_ENDPOINT_URL_STS=" + server.url() + "/_role/sts"},
       "check AWS_ROLE_ARN"},
      {{"AWS_CONFIG_FILE=" + process}, ""},
      {{"AWS_CONFIG_FILE=" + failing}, "the program of the profile failed"},
      {{"AWS_CONFIG_FILE=" + sso}, "aws configure export-credentials"},
  };
  for (const auto& [variables, says] : kCases) {
    SCOPED_TRACE(variables.front());
    const CommandResult got = server.run({"verify", in_bucket("hf")}, variables);
    EXPECT_EQ(got.exit_code == 0, says.empty()) << got.out << got.err;
    EXPECT_THAT(got.err, HasSubstr(says));
    EXPECT_THAT(got.out + got.err, Not(HasSubstr("s3cr3t")));
    EXPECT_THAT(got.out + got.err, Not(HasSubstr("t0ken")));
  }
}

// A presigned URL is read, and its query is shown nowhere.
TEST_F(Stores, ReadPresignedUrlsWithoutShowingThem) {
  const StandInServer server(directory_.path(), {"--query", "X-Signature=s3cr3t&a=b"});
  const std::string plain = server.url() + "/web/org/model/hf/model.safetensors",
                    url = plain + "?X-Signature=s3cr3t&a=b";
  EXPECT_NE(server.run({"verify", plain}).exit_code, 0);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"verify", url},
        {"inspect", url, "--json"},
        {"diff", url, url},
        {"convert", url, directory_ / "out", "--to", "hf", "--config", local("hf/config.json")},
        {"merge", "a=" + url, "b=" + url, directory_ / "merged", "--expression", "a + 0.5*(b - a)", "--to", "hf"},
        {"plan", url, "--to", "dcp", "--json"}}) {
    SCOPED_TRACE(words.front());
    const CommandResult got = server.run(words);
    EXPECT_EQ(got.exit_code, 0) << got.err;
    EXPECT_THAT(got.out + got.err, Not(HasSubstr("s3cr3t")));
  }
  for (const char* made : {"out", "merged"})
    EXPECT_THAT(text_of(directory_ / (std::string(made) + "/reshard_manifest.json")), Not(HasSubstr("s3cr3t")));
}

}  // namespace
}  // namespace reshard::storage_test
