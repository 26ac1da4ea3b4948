// Tests the auditor: damages every fixture in hundreds of ways and audits it like `reshard verify --config --mesh
// --bytes --replicas`. Damage that it misses must have changed nothing, or be of a kind that no audit of one checkpoint
// can see; then the comparison with a second copy must see it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>

#include "formats/encoding/torch_archive.h"
#include "formats/open.h"
#include "lib/audit/verification.h"
#include "tests/support/checkpoints.h"
#include "tests/support/damage.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::mutation_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kSeed = 20260417;
constexpr std::size_t kVariants = 200;   // the least number for each fixture
constexpr std::size_t kProgramRuns = 5;  // runs of the real program for each fixture

struct Fixture {
  std::string name, mesh;
};
const Fixture kFixtures[] = {{"tp8", "tp=8"},
                             {"fsdp8", "dp_shard=8"},
                             {"fsdp16", "dp_shard=16"},
                             {"hsdp2x4", "dp_replicate=2,dp_shard=4"},
                             {"fsdp4_tp2", "dp_shard=4,tp=2"},
                             {"fsdp2_tp2_optim", "dp_shard=2,tp=2"},
                             {"pp2_tp4", "pp=2,tp=4"},
                             {"single", "dp_shard=1"}};

// The options of an audit.
struct Question {
  std::string path, config;
  std::string mesh;  // empty: not declared
};

// The result of an audit: the first finding or error without data and with data; empty if there is none.
struct Answer {
  std::string headers, data;
  std::map<std::string, std::string> state;  // everything that was read: key -> dtype, shape, digest; or the object

  bool is_clean() const { return headers.empty() && data.empty(); }
};

std::string first(const Result<VerifyReport>& report) {
  if (!report) return report.error().message();
  return report->findings.empty() ? "" : report->findings[0].id + ": " + report->findings[0].what;
}

// Describes a key's place in the nested state_dict.
std::string said(const std::string& name, const KeyPath& path) {
  if (path.empty()) return " at '" + name + "'";
  std::string out = " at";
  for (const auto& part : path)
    out += std::holds_alternative<Index>(part) ? " " + std::to_string(std::get<Index>(part))
                                               : " '" + std::get<std::string>(part) + "'";
  return out;
}

// Returns everything in a checkpoint without findings.
Result<std::map<std::string, std::string>> state_of(const std::string& path, const VerifyReport& report) {
  std::map<std::string, std::string> state;
  OpenCheckpoint open = TRY(open_checkpoint(path));
  const Catalog& catalog = open.reader->catalog();
  for (const VerifiedTensor& t : report.tensors)
    state[t.name] = std::string(info(t.dtype).torch_name) + to_string(t.shape) + t.digest.hex() +
                    said(t.name, catalog.tensors()[*catalog.find(t.name)].path);
  for (const Blob& blob : catalog.blobs) {
    const auto file = TRY(open.reader->files().open(catalog.file_path(blob.extent.file)));
    const auto object = TRY(torch_archive::read_object_item(*file, blob.extent.offset, blob.extent.length));
    state[blob.name] = pickle::print(object.root(), 100, 10'000) + said(blob.name, blob.path);
  }
  return state;
}

VerifyOptions options_for(const Question& q) {
  VerifyOptions options;
  options.path = q.path;
  options.config = q.config;
  if (!q.mesh.empty()) options.mesh = *Mesh::parse(q.mesh);
  options.run.threads = 1;
  options.run.memory = Index{2} << 30;
  return options;
}

// Runs `reshard verify PATH --config C --mesh M`, and also with --bytes --replicas if that finds nothing.
Answer audit(const Question& q) {
  Answer answer;
  VerifyOptions options = options_for(q);
  answer.headers = first(verify(open_checkpoint, options));
  if (!answer.headers.empty()) return answer;
  options.bytes = options.replicas = true;
  const auto report = verify(open_checkpoint, options);
  answer.data = first(report);
  if (!answer.data.empty()) return answer;
  auto state = state_of(q.path, *report);
  if (state)
    answer.state = *std::move(state);
  else
    answer.data = state.error().message();
  return answer;
}

// Returns whether `reshard verify PATH --config C --against OTHER` finds a difference.
bool differs(const Question& q, const std::string& other) {
  VerifyOptions options = options_for({q.path, q.config, ""});
  options.against = other;
  const auto report = verify(open_checkpoint, options);
  return !report || std::any_of(report->findings.begin(), report->findings.end(),
                                [](const Finding& f) { return f.id.starts_with("against"); });
}

// ---- a broken copy, and its repair

class BrokenCopy {
 public:
  BrokenCopy(std::string directory, std::map<std::string, std::string> healthy)
      : directory_(std::move(directory)), healthy_(std::move(healthy)) {
    fs::create_directories(directory_);
    for (const auto& [name, bytes] : healthy_) write_file(directory_ + "/" + name, bytes);
  }
  void apply(const Damage& damage) {
    for (const auto& [name, bytes] : damage.files)
      if (bytes)
        write_file(directory_ + "/" + name, *bytes);
      else
        fs::remove(directory_ + "/" + name);
  }
  void repair(const Damage& damage) {
    for (const auto& [name, bytes] : damage.files) write_file(directory_ + "/" + name, healthy_.at(name));
  }

 private:
  std::string directory_;
  std::map<std::string, std::string> healthy_;
};

// ---- the count

struct Tally {
  int variants = 0;
  int by_headers = 0;    // detected without data
  int by_data = 0;       // detected only when all is read
  int equivalent = 0;    // everything reads as before
  int undetectable = 0;  // undetectable by construction; found by comparison with a second copy
  int missed = 0;

  Tally& operator+=(const Tally& t) {
    variants += t.variants;
    by_headers += t.by_headers;
    by_data += t.by_data;
    equivalent += t.equivalent;
    undetectable += t.undetectable;
    missed += t.missed;
    return *this;
  }
};

void print_tallies(const std::string& title, const std::map<std::string, Tally>& tallies) {
  std::printf("| %-42s | variants | headers | data | equivalent | undetectable | missed |\n", title.c_str());
  std::printf("| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  for (const auto& [name, t] : tallies)
    std::printf("| %-42s | %d | %d | %d | %d | %d | %d |\n", name.c_str(), t.variants, t.by_headers, t.by_data,
                t.equivalent, t.undetectable, t.missed);
}

// The tallies of all fixtures so far, for the table at the end.
std::map<std::string, Tally>& fixtures() {
  static std::map<std::string, Tally> all;
  return all;
}
std::map<std::string, Tally>& kinds(bool is_dcp) {
  static std::map<std::string, Tally> all[2];
  return all[is_dcp ? 1 : 0];
}

struct Experiment {
  Question question;
  std::vector<std::string> truths;  // checkpoints; an undetectable one must differ from at least one of them
  std::map<std::string, std::string> healthy_state;
};

Tally judge(const Experiment& e, const Damage& d, const Answer& answer) {
  Tally t;
  t.variants = 1;
  if (!answer.headers.empty())
    t.by_headers = 1;
  else if (!answer.data.empty())
    t.by_data = 1;
  else if (answer.state == e.healthy_state)
    t.equivalent = 1;
  else if (!d.undetectable.empty() && std::any_of(e.truths.begin(), e.truths.end(),
                                                  [&](const std::string& truth) { return differs(e.question, truth); }))
    t.undetectable = 1;
  else
    t.missed = 1;
  return t;
}

void expect_program_agrees(const Question& q, const Answer& answer, const Damage& d) {
  std::vector<std::string> argv = {RESHARD_BINARY, "verify",     q.path,    "--config",  q.config,
                                   "--bytes",      "--replicas", "--quiet", "--threads", "1"};
  if (!q.mesh.empty()) argv.insert(argv.end(), {"--mesh", q.mesh});
  const CommandResult r = run_command(argv);
  // 4: a flipped bit may turn a pickle's opcode into one that no data have.
  EXPECT_THAT(r.exit_code, testing::AnyOf(0, 1, 2, 3, 4)) << d.kind << ": " << d.what << "\n" << r.err;
  EXPECT_EQ(r.exit_code == 0, answer.is_clean()) << d.kind << ": " << d.what << "\n"
                                                 << r.out << r.err << answer.headers << answer.data;
}

// Damages the copy in each way and counts the results.
Tally run(const Experiment& e, BrokenCopy& copy, const std::vector<Damage>& damages, bool is_dcp) {
  Tally sum;
  const auto step = static_cast<std::size_t>(every_nth(3));
  for (std::size_t i = 0; i < damages.size(); i += step) {
    const Damage& d = damages[i];
    copy.apply(d);
    const Answer answer = audit(e.question);
    const Tally t = judge(e, d, answer);
    EXPECT_EQ(t.missed, 0) << e.question.path << ": " << d.kind << ": " << d.what << " was not seen";
    if (i / step % (damages.size() / step / kProgramRuns) == 0) expect_program_agrees(e.question, answer, d);
    kinds(is_dcp)[d.kind] += t;
    sum += t;
    copy.repair(d);
  }
  EXPECT_GE(damages.size(), kVariants);
  return sum;
}

// Returns the damages of one seed, or of eight in the soak.
std::vector<Damage> of_seeds(std::vector<Damage> (*damage)(const std::string& path, std::uint32_t seed),
                             const std::string& path) {
  std::vector<Damage> all;
  for (std::uint32_t s = 0; s < (in_soak() ? 8 : 1); ++s) {
    std::vector<Damage> some = damage(path, kSeed + s);
    all.insert(all.end(), std::make_move_iterator(some.begin()), std::make_move_iterator(some.end()));
  }
  return all;
}

class Mutation : public testing::TestWithParam<Fixture> {
 protected:
  void finish(const std::string& name, const Tally& t) {
    fixtures()[name] = t;
    RecordProperty("variants", t.variants);
    RecordProperty("detected_by_headers", t.by_headers);
    RecordProperty("detected_by_data", t.by_data);
    RecordProperty("equivalent", t.equivalent);
    RecordProperty("undetectable", t.undetectable);
    RecordProperty("missed", t.missed);
  }
  static void TearDownTestSuite() {
    print_tallies("fixture", fixtures());
    print_tallies("damage of DCP", kinds(true));
    print_tallies("damage of safetensors", kinds(false));
  }

  TempDir dir_;
};

TEST_P(Mutation, NoDamageOfADcpCheckpointIsMissed) {
  const std::string checkpoint = sample(GetParam().name) + "/checkpoint";
  Experiment e{{dir_ / "checkpoint", sample(GetParam().name) + "/config.json", GetParam().mesh},
               {sample(GetParam().name) + "/hf.safetensors", checkpoint},
               {}};
  BrokenCopy copy(e.question.path, all_files(checkpoint));
  const Answer healthy = audit(e.question);
  ASSERT_TRUE(healthy.is_clean()) << healthy.headers << healthy.data;
  e.healthy_state = healthy.state;
  const Damage none{"nothing", "", {{".metadata", rewritten_metadata(checkpoint)}}, ""};
  copy.apply(none);
  const Answer rewritten = audit(e.question);
  ASSERT_TRUE(rewritten.is_clean()) << rewritten.headers << rewritten.data;
  EXPECT_EQ(rewritten.state, healthy.state);
  copy.repair(none);
  finish(GetParam().name + " (DCP)", run(e, copy, of_seeds(damage_dcp, checkpoint), true));
}

TEST_P(Mutation, NoDamageOfASafetensorsFileIsMissed) {
  const std::string file = sample(GetParam().name) + "/hf.safetensors";
  Experiment e{{dir_ / "hf.safetensors", sample(GetParam().name) + "/config.json", ""}, {file}, {}};
  BrokenCopy copy(dir_.path(), {{"hf.safetensors", read_file(file)}});
  const Answer healthy = audit(e.question);
  ASSERT_TRUE(healthy.is_clean()) << healthy.headers << healthy.data;
  e.healthy_state = healthy.state;
  finish(GetParam().name + " (safetensors)", run(e, copy, of_seeds(damage_safetensors, file), false));
}

INSTANTIATE_TEST_SUITE_P(Samples, Mutation, testing::ValuesIn(sampled(kFixtures, 2)),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace reshard::mutation_test
