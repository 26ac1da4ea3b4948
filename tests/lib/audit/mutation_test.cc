// Proves the auditor: every fixture, broken in hundreds of ways, is audited as `reshard verify --config --mesh --bytes
// --replicas` does it. What it lets pass must have changed nothing, or be of a kind that no audit of one checkpoint can
// see; then the comparison with a second copy has to see it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include "formats/encoding/torch_archive.h"
#include "formats/registry.h"
#include "lib/audit/comparison.h"
#include "lib/audit/mesh_audit.h"
#include "lib/audit/model_audit.h"
#include "lib/audit/replicas.h"
#include "lib/audit/structure_audit.h"
#include "lib/model/placement.h"
#include "tests/support/checkpoints.h"
#include "tests/support/damage.h"
#include "tests/support/run_command.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kSeed = 20260417;
constexpr std::size_t kVariants = 200;   // at least, of each fixture
constexpr std::size_t kProgramRuns = 5;  // of the real program, for each fixture

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

RunOptions one_thread() {
  RunOptions options;
  options.threads = 1;
  options.memory = Index{2} << 30;
  return options;
}

// What the auditor is asked.
struct Question {
  std::string path, config;
  std::string mesh;  // empty: none is declared
};

// What it said: the first finding or error of each part, empty where there is none.
struct Answer {
  std::string headers, data;
  std::map<std::string, std::string> state;  // all that was read: key -> dtype, shape, digest; or the object

  bool is_clean() const { return headers.empty() && data.empty(); }
};

std::string first(const std::vector<Finding>& findings) {
  return findings.empty() ? "" : findings[0].id + ": " + findings[0].what;
}

// Without data. The reader's tensors are located where that is possible.
Result<std::vector<Finding>> audit_headers(const Question& q, OpenCheckpoint& open, bool& is_readable) {
  auto opened = open_checkpoint(q.path, {.files_too = true, .validated = false});
  std::string refusal;
  if (!opened) {
    refusal = opened.error().message();
    auto again = open_checkpoint(q.path, {.files_too = false, .validated = false});
    if (!again) return std::move(opened).error();
    opened = std::move(again);
  }
  open = *std::move(opened);
  const Catalog& catalog = open.reader->catalog();
  const ModelConfig config = TRY(read_config(q.config));
  const Family* family = family_of_model_type(config.model_type);
  if (!detect_convention(*family, catalog)) return unsupported("no tensor is named as a parameter of the model");
  StructureAudit structure = audit_structure(*open.reader, 1, "/tmp");
  std::vector<Finding> out = std::move(structure.findings);
  is_readable = structure.is_readable && !structure.metadata_only && refusal.empty();
  if (structure.metadata_only)
    out.push_back({Severity::kError, "file-missing", {}, "no data file is here", {}, "", ""});
  if (!refusal.empty()) out.push_back({Severity::kError, "reader", {}, refusal, {}, "", ""});
  const auto add = [&](std::vector<Finding> more) { out.insert(out.end(), more.begin(), more.end()); };
  add(TRY(audit_model(catalog, *family, config)).findings);
  if (q.mesh.empty()) return out;
  DeclaredLayout declared;
  declared.mesh = TRY(Mesh::parse(q.mesh));
  declared.title = declared.mesh.to_string();
  const Placer placer = TRY(Placer::make(declared.mesh, family, &config, catalog));
  declared.place = [&](const Tensor& t) -> Result<Placement> { return placer.place(t); };
  add(audit_mesh(catalog, declared, infer_mesh(catalog)).findings);
  return out;
}

// A key's place in the nested state_dict.
std::string said(const std::string& name, const KeyPath& path) {
  if (path.empty()) return " at '" + name + "'";
  std::string out = " at";
  for (const auto& part : path)
    out += std::holds_alternative<Index>(part) ? " " + std::to_string(std::get<Index>(part))
                                               : " '" + std::get<std::string>(part) + "'";
  return out;
}

std::string said(const Tensor& t, const TensorProof& proof) {
  return std::string(info(t.dtype).torch_name) + to_string(t.shape) + proof.source.hex() + said(t.name, t.path);
}

Result<std::vector<Finding>> audit_data(const OpenCheckpoint& open, std::map<std::string, std::string>& state) {
  Reader& reader = *open.reader;
  const Catalog& catalog = reader.catalog();
  std::vector<DigestRequest> requests;
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    requests.push_back({i, catalog.tensors()[i].dtype});
    all.push_back(i);
  }
  TRY(reader.locate(all, 1, "/tmp"));
  FileSource source(catalog, reader.files());
  const std::vector<TensorProof> proofs = TRY(digest_tensors(requests, source, one_thread()));
  for (const std::size_t i : all) state[catalog.tensors()[i].name] = said(catalog.tensors()[i], proofs[i]);
  for (const Blob& blob : catalog.blobs) {
    TRY(reader.blob_bytes(blob));
    const auto file = TRY(reader.files().open(catalog.file_path(blob.extent.file)));
    const auto object = TRY(torch_archive::read_object_item(*file, blob.extent.offset, blob.extent.length));
    state[blob.name] = pickle::print(object.root(), 100, 10'000) + said(blob.name, blob.path);
  }
  return TRY(compare_replicas(catalog, reader.files(), one_thread())).findings;
}

// `reshard verify PATH --config C --mesh M --bytes --replicas`, with the library.
Answer audit(const Question& q) {
  Answer answer;
  OpenCheckpoint open;
  bool is_readable = false;
  const auto headers = audit_headers(q, open, is_readable);
  answer.headers = headers ? first(*headers) : headers.error().message();
  if (!headers || !is_readable) return answer;
  const auto data = audit_data(open, answer.state);
  answer.data = data ? first(*data) : data.error().message();
  return answer;
}

// `reshard verify PATH --against OTHER`: whether that finds anything.
Result<bool> differs(const std::string& path, const std::string& other, const std::string& config) {
  OpenCheckpoint a = TRY(open_checkpoint(path)), b = TRY(open_checkpoint(other));
  ComparisonOptions options;
  options.config_a = options.config_b = config;
  options.run = one_thread();
  const auto c = TRY(Comparison::prepare(*a.reader, *b.reader, options));
  if (!c->only_a().empty() || !c->only_b().empty() || !c->reshaped().empty()) return true;
  for (const auto& d : TRY(c->digests()))
    if (d.a != d.b) return true;
  if (!TRY(c->differing_objects()).empty()) return true;
  // Objects that only one has are not compared by --against: here their names are, where both have any.
  const auto names = [](const OpenCheckpoint& open) {
    std::set<std::string> out;
    for (const Blob& blob : open.reader->catalog().blobs) out.insert(blob.name);
    return out;
  };
  return !names(a).empty() && !names(b).empty() && names(a) != names(b);
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
  int undetectable = 0;  // by construction; seen beside a second copy
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

// Of all fixtures so far, for the table at the end.
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
  std::vector<std::string> truths;  // what the undetectable have to differ from, one at least
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
  else if (!d.undetectable.empty() && std::any_of(e.truths.begin(), e.truths.end(), [&](const std::string& truth) {
             const auto result = differs(e.question.path, truth, e.question.config);
             return !result || *result;
           }))
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
  EXPECT_THAT(r.exit_code, testing::AnyOf(0, 1, 2, 3)) << d.kind << ": " << d.what << "\n" << r.err;
  EXPECT_EQ(r.exit_code == 0, answer.is_clean()) << d.kind << ": " << d.what << "\n"
                                                 << r.out << r.err << answer.headers << answer.data;
}

// Breaks the copy in each way, and counts what is said.
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
  finish(GetParam().name + " (DCP)", run(e, copy, damage_dcp(checkpoint, kSeed), true));
}

TEST_P(Mutation, NoDamageOfASafetensorsFileIsMissed) {
  const std::string file = sample(GetParam().name) + "/hf.safetensors";
  Experiment e{{dir_ / "hf.safetensors", sample(GetParam().name) + "/config.json", ""}, {file}, {}};
  BrokenCopy copy(dir_.path(), {{"hf.safetensors", read_file(file)}});
  const Answer healthy = audit(e.question);
  ASSERT_TRUE(healthy.is_clean()) << healthy.headers << healthy.data;
  e.healthy_state = healthy.state;
  finish(GetParam().name + " (safetensors)", run(e, copy, damage_safetensors(file, kSeed), false));
}

INSTANTIATE_TEST_SUITE_P(Samples, Mutation, testing::ValuesIn(kFixtures), [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace reshard
