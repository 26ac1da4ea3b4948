// SPDX-License-Identifier: Apache-2.0
// Tests reshard watch: every complete step of a run is converted once, and nothing is removed unless its output was
// proven.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "tests/support/changed_model.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/stand_in_server.h"
#include "tests/support/temp_dir.h"

namespace reshard::watch_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class Watch : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(run_); }

  // Saves a complete step.
  void save(int step) const {
    const CommandResult made = reshard_cli(
        {"synth", source(step), "--config", sample("tp8") + "/config.json", "--to", "dcp", "--mesh", "dp_shard=2"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
  }
  std::string source(int step) const { return run_ + "/step-" + std::to_string(step); }
  std::string output(int step) const { return models_ + "/step-" + std::to_string(step); }

  CommandResult watch(std::vector<std::string> more) const {
    std::vector<std::string> args = {"watch", run_, models_, "--to", "hf", "--once"};
    args.insert(args.end(), more.begin(), more.end());
    return reshard_cli(args);
  }
  // Names in a directory, without hidden ones.
  static std::set<std::string> names(const std::string& directory) {
    std::set<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
      if (const std::string name = entry.path().filename(); name[0] != '.') out.insert(name);
    return out;
  }

  const TempDir dir_;
  const std::string run_ = dir_ / "run", models_ = dir_ / "models";
};

TEST_F(Watch, ConvertsEachCompleteStepOnce) {
  save(100);
  save(200);
  std::filesystem::create_directory(source(300));  // an unfinished save, still without metadata
  std::filesystem::copy(source(200) + "/__0_0.distcp", source(300) + "/__0_0.distcp");
  const std::string log = dir_ / "log";
  const std::vector<std::string> then = {"--then", "echo {} >> " + log};
  ASSERT_EQ(watch(then).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200"));
  EXPECT_EQ(reshard_cli({"diff", output(200), source(200)}).exit_code, 0);
  const auto before = std::filesystem::last_write_time(output(100));
  std::filesystem::copy(source(200) + "/__1_0.distcp", source(300) + "/__1_0.distcp");
  std::filesystem::copy(source(200) + "/config.json", source(300) + "/config.json");
  std::filesystem::copy(source(200) + "/.metadata", source(300) + "/.metadata");
  ASSERT_EQ(watch(then).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200", "step-300"));
  EXPECT_EQ(std::filesystem::last_write_time(output(100)), before);
  EXPECT_EQ(read_file(log), output(100) + "\n" + output(200) + "\n" + output(300) + "\n");
}

TEST_F(Watch, TriesAgainWhatFailedAndGoesOnWithTheRest) {
  save(100);
  save(200);
  std::filesystem::resize_file(source(100) + "/__0_0.distcp", 100);  // all files exist, but one is truncated
  const CommandResult r = watch({"--then", "test -e " + (dir_ / "ready")});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_THAT(names(models_), ElementsAre("step-200"));
  EXPECT_THAT(r.out, HasSubstr("ended with exit code 1"));
  write_file(dir_ / "ready", "");
  const CommandResult again = watch({"--then", "test -e " + (dir_ / "ready")});
  EXPECT_THAT(again.out, HasSubstr("then      step-200"));
}

TEST_F(Watch, KeepsWhatIsAskedForAndTheNewestCompleteStep) {
  for (const int step : {100, 200, 300, 400, 500}) save(step);
  std::filesystem::remove(source(500) + "/__1_0.distcp");  // the newest step is incomplete
  ASSERT_EQ(watch({}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200", "step-300", "step-400"));
  write_file(dir_ / "best", "step-200\n");
  ASSERT_EQ(watch({"--keep-last", "1", "--keep-best", dir_ / "best"}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-200", "step-400"));
  EXPECT_EQ(names(run_).size(), 5u);
  ASSERT_EQ(watch({"--keep-every", "300", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-300", "step-400"));
  EXPECT_THAT(names(run_), ElementsAre("step-300", "step-400", "step-500"));
  EXPECT_EQ(watch({"--prune-source"}).exit_code, 2);
  EXPECT_EQ(reshard_cli({"watch", run_, run_ + "/models", "--to", "hf", "--once"}).exit_code,
            2);  // it would watch its own output
}

// It would otherwise take the run's own checkpoints for its outputs and remove them.
TEST_F(Watch, RefusesTheRunAsItsDestination) {
  for (const int step : {100, 200}) save(step);
  std::filesystem::create_directory_symlink(run_, dir_ / "link");
  for (const std::string& models : {run_, run_ + "/.", dir_ / "link"}) {
    const CommandResult r = reshard_cli({"watch", run_, models, "--to", "hf", "--once", "--keep-last", "1"});
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_THAT(r.err, HasSubstr("is the run or inside it")) << models;
    EXPECT_THAT(names(run_), ElementsAre("step-100", "step-200"));
  }
}

TEST_F(Watch, ItsDestinationMayBeALink) {
  save(100);
  std::filesystem::create_directory(dir_ / "disk");
  std::filesystem::create_directory_symlink(dir_ / "disk", models_);
  const CommandResult r = watch({});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(names(dir_ / "disk"), ElementsAre("step-100"));
}

TEST_F(Watch, ADamagedRecordOfThePageIsAnError) {
  save(100);
  std::filesystem::create_directory(models_);
  for (const std::string facts : {"7", R"({"source_files": -1})", R"({"moved": 1})", R"({"converted": "x"})"}) {
    write_file(models_ + "/.reshard-watch-page.json", R"({"steps": {"step-100": )" + facts + "}}");
    const CommandResult r = watch({"--html", dir_ / "page.html"});
    EXPECT_EQ(r.exit_code, 3) << facts << r.err;
    EXPECT_THAT(r.err, HasSubstr(".reshard-watch-page.json: step 'step-100': "));
  }
  write_file(models_ + "/.reshard-watch-page.json", R"({"steps": {"step-100": {"converted": 9000000000000000000}}})");
  EXPECT_EQ(watch({"--html", dir_ / "page.html"}).exit_code, 0);
}

// The best step must not be removed because of how its file is written, or before that is written.
TEST_F(Watch, RemovesNothingUntilTheBestStepIsKnown) {
  for (const int step : {100, 200, 300}) save(step);
  ASSERT_EQ(watch({}).exit_code, 0);
  const std::string best = dir_ / "best";
  const std::vector<std::string> keep = {"--keep-last", "1", "--keep-best", best, "--prune-source"};
  EXPECT_EQ(watch(keep).exit_code, 0);  // there is no file yet
  for (const std::string text : {"", "\n  \n", "150", "100\ncheckpoint-200", "step-100.old"}) {
    write_file(best, text);
    const CommandResult r = watch(keep);
    EXPECT_EQ(r.exit_code, text.find_first_not_of("\n ") == std::string::npos ? 0 : 1) << text;
    EXPECT_THAT(names(run_), ElementsAre("step-100", "step-200", "step-300")) << text;
  }
  const std::vector<std::string> good = {" 100 \r\n", source(100) + "/", output(100) + "\n", "00100",
                                         "\tstep-100\r\n\n"};
  for (const std::string& text : good) {
    write_file(best, text);
    ASSERT_EQ(watch(keep).exit_code, 0) << text;
    EXPECT_THAT(names(run_), ElementsAre("step-100", "step-300")) << text;
    EXPECT_THAT(names(models_), ElementsAre("step-100", "step-300")) << text;
  }
}

TEST_F(Watch, KeepsAnOutputUntilANewerOneIsThere) {
  for (const int step : {100, 200}) save(step);
  ASSERT_EQ(watch({}).exit_code, 0);
  save(300);
  std::string data = read_file(source(300) + "/__0_0.distcp");
  data[data.size() / 2] ^= 1;  // the newest is damaged
  write_file(source(300) + "/__0_0.distcp", data);
  EXPECT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 1);
  EXPECT_THAT(names(models_), ElementsAre("step-200"));
  EXPECT_THAT(names(run_), ElementsAre("step-200", "step-300"));
  const CommandResult bucket =
      reshard_cli({"watch", "s3://bucket/run", models_, "--to", "hf", "--keep-last", "1", "--prune-source", "--once"});
  EXPECT_EQ(bucket.exit_code, 4) << bucket.err;
}

// Two directories that must stay: one that only has a step's name, and a step that a lost record does not prove.
TEST_F(Watch, RemovesNothingThatItHasNotProven) {
  for (const int step : {100, 200}) save(step);
  std::filesystem::create_directories(output(100));
  write_file(output(100) + "/mine", "x");
  EXPECT_EQ(watch({}).exit_code, 1);
  EXPECT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_EQ(read_file(output(100) + "/mine"), "x");
  EXPECT_THAT(names(run_), ElementsAre("step-100", "step-200"));
  std::filesystem::remove_all(output(100));
  ASSERT_EQ(watch({}).exit_code, 0);
  std::filesystem::remove(models_ + "/.reshard-watch.json");
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(names(run_), ElementsAre("step-100", "step-200"));
}

// A kill between the output's appearance and the record of it.
TEST_F(Watch, KnowsOutputsThatAppearedWhenItWasKilled) {
  for (const int step : {100, 200, 300}) save(step);
  ASSERT_EQ(watch({}).exit_code, 0);
  write_file(models_ + "/.reshard-watch.json",
             R"({"steps": {}, "started": {"step-100": ")" + source(100) + R"(", "step-200": ")" + source(300) + "\"}}");
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-300"));
  EXPECT_THAT(names(run_), ElementsAre("step-200", "step-300"));  // nothing proves step-200
}

TEST_F(Watch, TakesTheOptimizerOutOfOlderStepsThatAreProven) {
  const std::string config = sample("tp8") + "/config.json";
  for (const int step : {100, 200, 300})
    ASSERT_EQ(
        reshard_cli({"synth", source(step), "--config", config, "--to", "dcp", "--mesh", "dp_shard=2", "--optimizer"})
            .exit_code,
        0);
  std::filesystem::create_directory(source(100) + "/logs");
  write_file(source(100) + "/logs/loss.txt", "1.5");
  write_file(source(100) + "/config.json", read_file(config) + " ");
  const auto state = [&](int step) { return reshard_cli({"inspect", source(step), "--filter", "*"}).out; };
  const std::string whole = state(200);
  EXPECT_EQ(watch({"--then", "false", "--without-optimizer-after", "2"}).exit_code, 1);
  EXPECT_THAT(state(100), HasSubstr("exp_avg"));  // the command refused it
  std::filesystem::create_symlink("config.json", source(100) + "/link");
  EXPECT_THAT(watch({"--without-optimizer-after", "2"}).out, HasSubstr("neither a file nor a directory"));
  EXPECT_THAT(state(100), HasSubstr("exp_avg"));
  std::filesystem::remove(source(100) + "/link");
  for (int k = 0; k < 2; ++k) ASSERT_EQ(watch({"--without-optimizer-after", "2"}).exit_code, 0);
  EXPECT_THAT(state(100), Not(HasSubstr("exp_avg")));
  EXPECT_EQ(state(200), whole);
  EXPECT_EQ(reshard_cli({"diff", output(100), source(100)}).exit_code, 0);
  EXPECT_EQ(reshard_cli({"verify", source(100)}).exit_code, 0);
  EXPECT_EQ(read_file(source(100) + "/logs/loss.txt"), "1.5");
  EXPECT_EQ(read_file(source(100) + "/config.json"), read_file(config) + " ");
  EXPECT_TRUE(std::filesystem::exists(source(100) + "/__1_0.distcp"));  // as many files as before
  for (const auto& entry : std::filesystem::directory_iterator(run_))
    EXPECT_THAT(entry.path().filename(), testing::StartsWith("step-"));
}

// A trainer that resumes from an older step, because it names a step only when it is told to, needs its optimizer.
TEST_F(Watch, LeavesTheOptimizerOfStepsThatTheRunNames) {
  const std::string config = sample("tp8") + "/config.json";
  const auto has_optimizer = [&](int step) {
    return reshard_cli({"inspect", source(step), "--filter", "*"}).out.find("exp_avg") != std::string::npos;
  };
  const auto with_optimizer = [&] {
    std::set<int> out;
    for (const int step : {100, 200, 300, 400, 500})
      if (std::filesystem::exists(source(step)) && has_optimizer(step)) out.insert(step);
    return out;
  };
  for (const int step : {100, 200, 300, 400, 500})
    ASSERT_EQ(reshard_cli({"synth", source(step), "--config", config, "--to", "dcp", "--optimizer"}).exit_code, 0);
  write_file(run_ + "/latest_checkpointed_iteration.txt", "100");
  write_file(run_ + "/latest", "step-200\n");
  std::filesystem::create_symlink("step-300", run_ + "/best");
  const std::vector<std::string> options = {"--without-optimizer-after", "1"};
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_THAT(with_optimizer(), ElementsAre(100, 200, 300, 500));
  EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200", "step-300", "step-400", "step-500"));
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(with_optimizer(), ElementsAre(100, 200, 300, 500));
  EXPECT_FALSE(std::filesystem::exists(source(400)));
  std::filesystem::remove(run_ + "/best");
  write_file(run_ + "/latest_checkpointed_iteration.txt", "500");
  write_file(run_ + "/latest", "step-500\n");
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_THAT(with_optimizer(), ElementsAre(500));
}

// Megatron's, which names a step only when all of it is written, and which it resumes from.
TEST_F(Watch, KeepsTheSourceThatTheRunResumesFrom) {
  const std::string config = sample("tp8") + "/config.json";
  for (const std::string step : {"iter_0000100", "iter_0000200", "iter_0000300"}) {
    ASSERT_EQ(reshard_cli({"synth", dir_ / step, "--config", config, "--to", "megatron"}).exit_code, 0);
    std::filesystem::rename(dir_ / (step + "/release"), run_ + "/" + step);
  }
  write_file(run_ + "/latest_checkpointed_iteration.txt", "200");
  const std::vector<std::string> options = {"--config", config, "--keep-last", "1", "--prune-source"};
  ASSERT_EQ(watch({"--config", config}).exit_code, 0);
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("iter_0000300"));
  EXPECT_THAT(names(run_), ElementsAre("iter_0000200", "iter_0000300", "latest_checkpointed_iteration.txt"));
  write_file(run_ + "/latest_checkpointed_iteration.txt", "300");
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_THAT(names(run_), ElementsAre("iter_0000300", "latest_checkpointed_iteration.txt"));
}

// Each call is a new process, which knows of earlier failures by the record alone.
TEST_F(Watch, RemovesNothingThatItsCommandRefused) {
  for (const int step : {100, 200}) save(step);
  const std::string log = dir_ / "log";
  const std::vector<std::string> then = {"--then", "test -e " + (dir_ / "ready") + " && echo {} >> " + log,
                                         "--keep-last", "1", "--prune-source"};
  EXPECT_EQ(watch({"--then", "false"}).exit_code, 1);
  for (int k = 0; k < 2; ++k) {
    EXPECT_EQ(watch(then).exit_code, 1);
    EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200"));
    EXPECT_THAT(names(run_), ElementsAre("step-100", "step-200"));
  }
  write_file(dir_ / "ready", "");
  std::filesystem::create_directory(run_ + "/.reshard-removing-step-50");  // a kill while it was removed
  const std::vector<std::string> unfinished = {models_ + "/.reshard-watch.json.partial-7",  // likewise, written
                                               models_ + "/.reshard-watch-page.json.partial-7"};
  for (const std::string& record : unfinished) write_file(record, "{");
  EXPECT_EQ(watch(then).exit_code, 0);
  for (const std::string& record : unfinished) EXPECT_FALSE(std::filesystem::exists(record)) << record;
  EXPECT_EQ(read_file(log), output(100) + "\n" + output(200) + "\n");
  EXPECT_THAT(names(models_), ElementsAre("step-200"));
  EXPECT_THAT(names(run_), ElementsAre("step-200"));
  EXPECT_FALSE(std::filesystem::exists(run_ + "/.reshard-removing-step-50"));
}

// The page is made of what was measured before steps were removed, by several processes.
TEST_F(Watch, WritesAPageOfAllStepsAndOfWhatMovedBetweenThem) {
  const auto step = [&](int number, std::size_t every) {
    write_changed_model(source(number), [&](std::size_t at, char byte) {
      return static_cast<char>(every > 0 && at * 2654435761u % every == 0 ? byte ^ 1 : byte);
    });
  };
  step(100, 0);
  step(200, 50);
  std::map<std::string, double> expected;  // relative distances of tensors that are a layer by themselves
  const auto differing = parse_json(reshard_cli({"diff", source(100), source(200), "--json"}).out, "diff");
  ASSERT_TRUE(differing) << differing.error().message();
  const auto compared = *differing->get_array("tensors");
  for (const Json& tensor : compared)
    expected[std::string(*tensor.get_string("name"))] = *tensor.find("relative_l2")->as_double();
  const std::vector<std::string> options = {"--html", dir_ / "page.html", "--keep-last", "1", "--prune-source"};
  ASSERT_EQ(watch({"--html", dir_ / "page.html"}).exit_code, 0);
  step(300, 7);
  std::filesystem::resize_file(source(300) + "/model.safetensors", 5000);  // incomplete
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-200"));
  const std::string page = read_file(dir_ / "page.html");
  EXPECT_THAT(page, HasSubstr("2 steps converted, the newest is step-200, 1 kept, 1 not complete yet"));
  const std::string begins = "id=\"data\">";
  const std::size_t at = page.find(begins) + begins.size();
  const auto json = parse_json(page.substr(at, page.find("</script>", at) - at), "page");
  ASSERT_TRUE(json) << json.error().message();
  const Json& data = *json->find("data");
  std::vector<std::string> states;
  const auto rows = *data.get_array("steps"), moved = *data.get_array("moved");
  for (const Json& row : rows) states.emplace_back(*row.get_string("state"));
  EXPECT_THAT(states, ElementsAre("converted, then removed", "converted", "incomplete"));
  EXPECT_EQ(*rows.back().get_string("name"), "step-300");
  const auto layers = *data.get_array("layers");
  std::set<std::string> seen;
  for (const Json& cell : moved) {
    const std::string layer(*layers[static_cast<std::size_t>(*cell.as_array()->front().as_index())].as_string());
    EXPECT_EQ(*(*cell.as_array())[1].as_index(), 1) << layer;
    seen.insert(layer);
    if (const auto alone = expected.find(layer + ".weight"); alone != expected.end()) {
      EXPECT_DOUBLE_EQ(*cell.as_array()->back().as_double(), alone->second) << layer;
    }
  }
  EXPECT_THAT(seen, testing::IsSupersetOf({"model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"}));
}

// A shell command that runs in the background until this is destroyed or it is killed.
class Background {
 public:
  explicit Background(std::string command) {
    command = "exec " + command;
    std::string shell = "/bin/sh", option = "-c";
    char* const argv[] = {shell.data(), option.data(), command.data(), nullptr};
    if (::posix_spawn(&child_, "/bin/sh", nullptr, nullptr, argv, environ) != 0) std::abort();
  }
  ~Background() { end(SIGTERM); }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  void end(int signal) {
    if (child_ <= 0) return;
    ::kill(child_, signal);
    ::waitpid(child_, nullptr, 0);
    child_ = 0;
  }

 private:
  pid_t child_ = 0;
};

bool comes_true(const std::function<bool()>& condition) {
  for (int k = 0; k < 600 && !condition(); ++k) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return condition();
}
bool appears(const std::string& path) {
  return comes_true([&] { return std::filesystem::exists(path); });
}
std::string watch_command(const std::string& run, const std::string& models, const std::string& more) {
  return "'" + std::string(RESHARD_BINARY) + "' watch '" + run + "' '" + models + "' --to hf " + more;
}

// A job starts its watcher first. --interval would find what happens an hour later.
TEST_F(Watch, WaitsForARunThatDoesNotExist) {
  std::filesystem::remove(run_);
  EXPECT_EQ(watch({}).exit_code, 5);  // --once
  const std::string link = dir_ / "a/current", log = dir_ / "log";
  EXPECT_EQ(reshard_cli({"watch", link, link + "/models", "--to", "hf"}).exit_code, 2);
  write_file(dir_ / "file", "");
  EXPECT_EQ(reshard_cli({"watch", dir_ / "file", models_, "--to", "hf"}).exit_code, 5);
  Background child(watch_command(link, models_, "--interval 3600 --keep-last 9 --prune-source > '" + log + "'"));
  const auto logged = [&](const std::string& text) {
    return comes_true([&] { return read_file(log).find(text) != std::string::npos; });
  };
  EXPECT_TRUE(appears(log) && logged("current does not exist yet"));
  std::filesystem::create_directory(run_);
  save(1);
  std::filesystem::rename(run_, dir_ / "first");
  std::filesystem::create_directory(dir_ / "a");
  std::filesystem::create_directory_symlink(dir_ / "first", link);
  EXPECT_TRUE(appears(output(1)));
  std::filesystem::create_directory(run_);
  save(2);
  std::filesystem::rename(run_, dir_ / "second");
  std::filesystem::create_directory_symlink(dir_ / "second", link + ".new");
  std::filesystem::rename(link + ".new", link);
  EXPECT_TRUE(appears(output(2)));
  std::filesystem::rename(dir_ / "second", dir_ / "away");
  std::filesystem::remove(link);
  EXPECT_TRUE(logged("current is gone"));
  std::filesystem::create_directory(link);
  std::filesystem::create_directory(run_);
  save(3);
  std::filesystem::rename(source(3), link + "/step-3");
  EXPECT_TRUE(appears(output(3)));
  child.end(SIGTERM);
  const std::string text = read_file(log);
  for (const std::string once : {"does not exist", "is gone"}) EXPECT_EQ(text.find(once), text.rfind(once)) << text;
}

TEST_F(Watch, WaitsForARunInABucket) {
  save(1);
  std::filesystem::create_directories(dir_ / "served/org");
  const StandInServer server(dir_ / "served");
  std::string environment = "env";
  for (const std::string& variable : server.environment()) environment += " '" + variable + "'";
  EXPECT_EQ(server.run({"watch", "s3://org/run", models_, "--to", "hf", "--once"}).exit_code, 5);
  const std::string log = dir_ / "log";
  const Background child(environment + " " +
                         watch_command("s3://org/run/", models_, "--interval 0.1 > '" + log + "' 2>&1"));
  EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(log) && !read_file(log).empty(); }));
  EXPECT_THAT(read_file(log), HasSubstr("does not exist yet"));
  std::filesystem::rename(run_, dir_ / "served/org/run");
  EXPECT_TRUE(appears(output(1))) << read_file(log);
}

// Sets the time of a step's files to an hour ago: a step in the place of another must not be new.
void make_older(const std::string& step) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(step))
    std::filesystem::last_write_time(entry.path(), std::filesystem::last_write_time(step) - std::chrono::hours(1));
}

// A trainer that starts again saves other steps under the same names. They are not what was converted.
TEST_F(Watch, ConvertsAStepThatReplacesAConvertedOne) {
  const auto model = [&](int step, char change) {
    write_changed_model(source(step), [&](std::size_t, char byte) { return static_cast<char>(byte ^ change); });
  };
  for (const int step : {100, 200, 300}) model(step, 0);
  const std::string log = dir_ / "log";
  const std::vector<std::string> options = {"--then", "echo {} >> " + log, "--html", dir_ / "page.html"};
  ASSERT_EQ(watch(options).exit_code, 0);
  std::filesystem::remove_all(run_);
  std::filesystem::create_directory(run_);
  for (const int step : {100, 200, 300}) model(step, 1);
  const std::string as_before = read_file(output(100) + "/model.safetensors");
  // Still being written, so neither converted nor removed.
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(names(run_), ElementsAre("step-100", "step-200", "step-300"));
  EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200", "step-300"));
  make_older(source(100));
  make_older(source(300));
  std::filesystem::resize_file(source(200) + "/model.safetensors", 5000);
  make_older(source(200));
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_NE(read_file(output(100) + "/model.safetensors"), as_before);
  EXPECT_EQ(reshard_cli({"diff", output(300), source(300)}).exit_code, 0);
  EXPECT_EQ(read_file(output(200) + "/model.safetensors"), as_before);  // its source is incomplete
  const std::string once = output(100) + "\n" + output(200) + "\n" + output(300) + "\n";
  EXPECT_EQ(read_file(log), once + output(100) + "\n" + output(300) + "\n");
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_EQ(read_file(log), once + output(100) + "\n" + output(300) + "\n");
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(names(run_), ElementsAre("step-200", "step-300"));
}

// Lightning's names. A file of one rank, and one without a step, are no steps.
TEST_F(Watch, ConvertsStepsThatAreFiles) {
  const std::string config = sample("tp8") + "/config.json";
  ASSERT_EQ(reshard_cli({"synth", dir_ / "made", "--config", config, "--to", "bin"}).exit_code, 0);
  const std::string state = read_file(dir_ / "made/pytorch_model.bin");
  for (const std::string name : {"epoch=0-val_loss=0.52-step=1000.ckpt", "epoch=1-val_loss=0.51-step=2000.ckpt",
                                 "epoch=2-step=900-v1.ckpt", "last.ckpt", "step=3000-rank0.ckpt"})
    write_file(run_ + "/" + name, state);
  write_file(run_ + "/epoch=3-step=4000.ckpt", state.substr(0, state.size() / 2));
  write_file(run_ + "/step=5000.log", "loss 0.5");
  const std::vector<std::string> options = {"--config", config, "--every", "100"};
  ASSERT_EQ(watch(options).exit_code, 0);
  EXPECT_THAT(names(models_),
              ElementsAre("epoch=0-val_loss=0.52-step=1000", "epoch=1-val_loss=0.51-step=2000", "epoch=2-step=900-v1"));
  EXPECT_EQ(reshard_cli({"latest", run_}).out, run_ + "/epoch=1-val_loss=0.51-step=2000.ckpt\n");
  EXPECT_EQ(reshard_cli({"diff", models_ + "/epoch=2-step=900-v1", run_ + "/last.ckpt"}).exit_code, 0);
  write_file(dir_ / "best", run_ + "/epoch=2-step=900-v1.ckpt\n");
  ASSERT_EQ(watch({"--keep-last", "1", "--keep-best", dir_ / "best", "--prune-source", "--config", config}).exit_code,
            0);
  EXPECT_THAT(names(models_), ElementsAre("epoch=1-val_loss=0.51-step=2000", "epoch=2-step=900-v1"));
  EXPECT_THAT(names(run_), testing::Not(testing::Contains("epoch=0-val_loss=0.52-step=1000.ckpt")));
}

// With save_top_k, the step to resume from may be only in last.ckpt.
TEST_F(Watch, LatestKnowsTheStepInLastCkpt) {
  const std::string first = run_ + "/epoch=0-step=1.ckpt", last = run_ + "/last.ckpt", sixth = run_ + "/step=6.ckpt";
  std::filesystem::copy(RESHARD_TEST_DATA "/runs/lightning_last/checkpoints", run_);
  EXPECT_EQ(reshard_cli({"latest", run_}).out, last + "\n");
  EXPECT_EQ(reshard_cli({"latest", dir_.path()}).out, last + "\n");
  ASSERT_EQ(watch({"--family", "none"}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("epoch=0-step=1"));  // last.ckpt is overwritten by the next save
  std::filesystem::copy(last, sixth);
  EXPECT_EQ(reshard_cli({"latest", run_, "--all"}).out, first + "   complete\n" + sixth + "   complete\n");
  std::filesystem::remove(sixth);
  std::filesystem::resize_file(last, 4000);
  EXPECT_EQ(reshard_cli({"latest", run_}).out, first + "\n");
}

TEST_F(Watch, LatestLooksAtTheNewestOfManySteps) {
  for (int step = 1; step <= 10'050; ++step) std::filesystem::create_directory(source(step));
  save(20'000);
  EXPECT_EQ(reshard_cli({"latest", run_}).out, source(20'000) + "\n");
}

TEST_F(Watch, RefusesTwoStepsOfOneName) {
  const std::string data = RESHARD_TEST_DATA "/runs/lightning_last/checkpoints/last.ckpt";
  for (const std::string name : {"step=1.ckpt", "step=1.pt"}) std::filesystem::copy(data, run_ + "/" + name);
  const CommandResult r = watch({"--family", "none"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("/step=1.pt: its output would be called step=1, as that of " + run_ + "/step=1.ckpt"));
}

// Trainer saves the model, and then the optimizer. An output of the model alone would replace both.
TEST_F(Watch, WaitsForTheOptimizerNextToTheModel) {
  const std::string data = RESHARD_TEST_DATA "/runs/numbered_optimizer/", optimizer = source(100) + "/optimizer.pt";
  const std::vector<std::string> options = {"--family", "none"};
  std::filesystem::create_directory(source(100));
  std::filesystem::copy(data + "model.safetensors", source(100) + "/model.safetensors");
  const std::string whole = read_file(data + "whole.pt");
  for (const std::size_t size : {std::size_t{0}, std::size_t{1000}, whole.size() - 1, whole.size()}) {
    write_file(optimizer, whole.substr(0, size));
    const CommandResult r = watch(options);
    EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
    EXPECT_EQ(std::filesystem::exists(output(100)), size == whole.size()) << size;
    if (size == 1000) {
      EXPECT_THAT(reshard_cli({"latest", run_, "--all"}).out, HasSubstr("optimizer.pt is not complete"));
    }
  }
}

// Trainer gathers the optimizer before it creates its file. trainer_state.json is what it writes last.
TEST_F(Watch, WaitsForTheLastFileOfTrainer) {
  const std::string step = run_ + "/checkpoint-100", data = RESHARD_TEST_DATA "/runs/numbered_optimizer/";
  const auto converts = [&] {
    const CommandResult r = watch({"--family", "none"});
    EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
    return std::filesystem::exists(models_ + "/checkpoint-100");
  };
  const auto age = [&](std::chrono::minutes by) {
    for (const auto& file : std::filesystem::directory_iterator(step))
      std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - by);
  };
  std::filesystem::create_directory(step);
  std::filesystem::copy(data + "model.safetensors", step + "/model.safetensors");
  EXPECT_FALSE(converts());
  EXPECT_THAT(reshard_cli({"latest", run_, "--all"}).out, HasSubstr("trainer_state.json is not there yet"));
  write_file(step + "/training_args.bin", "");
  age(std::chrono::minutes(30));
  EXPECT_FALSE(converts());
  std::filesystem::copy(data + "whole.pt", step + "/optimizer.pt");
  EXPECT_FALSE(converts());
  write_file(step + "/trainer_state.json", "{}");
  EXPECT_TRUE(converts());
  std::filesystem::remove_all(models_);
  std::filesystem::remove(step + "/trainer_state.json");
  age(std::chrono::minutes(90));
  EXPECT_TRUE(converts());  // a copy of the step's other files
  std::filesystem::remove_all(models_);
  std::filesystem::remove(step + "/training_args.bin");
  std::filesystem::remove(step + "/optimizer.pt");
  age(std::chrono::minutes(2));
  EXPECT_TRUE(converts());  // another program's
}

// With a limit of its own, a trainer removes steps before --keep-last does.
TEST_F(Watch, RemovesOutputsOfStepsThatTheTrainerRemoved) {
  for (const int step : {100, 200, 300, 400}) {
    save(step);
    ASSERT_EQ(watch({"--keep-last", "3"}).exit_code, 0);
    if (step > 100) std::filesystem::remove_all(source(step - 100));
  }
  EXPECT_THAT(names(models_), ElementsAre("step-200", "step-300", "step-400"));
  std::filesystem::remove_all(source(400));
  save(50);
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source"}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-400", "step-50"));
  EXPECT_THAT(names(run_), ElementsAre("step-50"));
}

// A checkpoint without a number ("final") is no older step.
TEST_F(Watch, NeitherRemovesNorRewritesACheckpointWithoutANumber) {
  for (const int step : {100, 200}) {
    const CommandResult made =
        reshard_cli({"synth", source(step), "--config", sample("tp8") + "/config.json", "--to", "dcp", "--optimizer"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
  }
  std::filesystem::copy(source(200), run_ + "/final", std::filesystem::copy_options::recursive);
  ASSERT_EQ(watch({}).exit_code, 0);
  ASSERT_EQ(watch({"--keep-last", "1", "--prune-source", "--without-optimizer-after", "1"}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("final", "step-200"));
  EXPECT_THAT(names(run_), ElementsAre("final", "step-200"));
  EXPECT_EQ(reshard_cli({"latest", run_}).out, source(200) + "\n");
  EXPECT_EQ(reshard_cli({"diff", source(200), run_ + "/final"}).exit_code, 0);
}

// A link to a step, which the trainer moves, is no step of its own.
TEST_F(Watch, TakesLinksBetweenStepsForNone) {
  save(100);
  std::filesystem::create_symlink("step-100", run_ + "/latest");
  std::filesystem::rename(run_ + "/step-100", dir_ / "step-90");
  std::filesystem::create_symlink(dir_ / "step-90", source(90));
  save(100);
  ASSERT_EQ(watch({}).exit_code, 0);
  EXPECT_THAT(names(models_), ElementsAre("step-100", "step-90"));
  EXPECT_EQ(reshard_cli({"latest", run_}).out, source(100) + "\n");
}

// --interval would find the step an hour later.
TEST_F(Watch, HearsOfNewStepsAtOnceInLocalDirectories) {
  const Background child(watch_command(run_, models_, "--interval 3600 > '" + (dir_ / "log") + "'"));
  EXPECT_TRUE(appears(models_));
  save(100);
  EXPECT_TRUE(appears(output(100)));
  std::filesystem::copy(source(100), dir_ / "saved");
  std::filesystem::rename(dir_ / "saved/.metadata", dir_ / "metadata");
  std::filesystem::rename(dir_ / "saved", source(200));  // without its metadata, which comes later
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT_FALSE(std::filesystem::exists(output(200)));
  std::filesystem::rename(dir_ / "metadata", source(200) + "/.metadata");
  EXPECT_TRUE(appears(output(200)));
}

// Kills it at other times in each round, until it was killed twice between the first output and the last.
TEST_F(Watch, ResumesAfterItIsKilledAtAnyTime) {
  for (const int step : {100, 200, 300}) save(step);
  const std::string log = dir_ / "log";
  const std::vector<std::string> then = {"--then", "echo {} >> " + log};
  const auto began = std::chrono::steady_clock::now();
  ASSERT_EQ(watch(then).exit_code, 0);
  const auto whole = std::chrono::steady_clock::now() - began;
  int in_between = 0;
  for (int round = 0; round < 40 && (round < 8 || in_between < 2); ++round) {
    std::filesystem::remove_all(models_);
    Background child(watch_command(run_, models_, "--once --then 'echo {} >> " + log + "'"));
    std::this_thread::sleep_for(whole * (round % 8 + 1) / 9);
    child.end(SIGKILL);
    std::vector<std::string> done;
    if (std::filesystem::exists(models_))
      for (const std::string& name : names(models_))
        if (name.find(".p") == std::string::npos) done.push_back(name);  // not .partial, .publishing
    for (const std::string& name : done)
      EXPECT_TRUE(std::filesystem::exists(models_ + "/" + name + "/reshard_manifest.json")) << name;
    in_between += !done.empty() && done.size() < 3 ? 1 : 0;
    std::filesystem::remove(log);
    ASSERT_EQ(watch(then).exit_code, 0);
    EXPECT_THAT(names(models_), ElementsAre("step-100", "step-200", "step-300"));
    if (done.size() < 3) {
      EXPECT_THAT(read_file(log), HasSubstr(output(300)));
    }
  }
  EXPECT_GE(in_between, 2);
  for (const int step : {100, 200, 300}) EXPECT_EQ(reshard_cli({"diff", output(step), source(step)}).exit_code, 0);
}

}  // namespace
}  // namespace reshard::watch_test
