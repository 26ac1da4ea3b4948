// SPDX-License-Identifier: Apache-2.0
// reshard check: whether a model can be trained on a mesh.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/forecast/feasibility.h"
#include "tools/commands.h"
#include "tools/findings_report.h"
#include "tools/html_report.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

constexpr std::size_t kShownStages = 8;  // kinds of stages
constexpr std::size_t kIndent = 10;      // column of print_row's text
constexpr std::size_t kWhose = 42;       // columns of the first column of the table
constexpr std::size_t kElements = 18;    // of a number of parameters
constexpr std::size_t kBytes = 12;       // of a size

struct CheckOptions {
  std::string mesh, dtype, grad_dtype = "float32";
  Index world = 0, sequence = 0;
  bool tensors = false;
  ModelOptions model;
  FindingsOptions findings;
};

// The result of a check and its request.
struct Checked {
  const CheckOptions& options;
  const Family& family;
  const ModelConfig& config;
  FeasibilityRequest request;
  Feasibility result;
};

Result<DType> find_dtype(const std::string& text) {
  constexpr std::array kDtypes = {DType::kFloat32, DType::kBFloat16,   DType::kFloat16,
                                  DType::kFloat64, DType::kFloat8E4M3, DType::kFloat8E5M2};
  const auto dtype = dtype_from_user(text);
  std::vector<std::string> names;
  for (const DType known : kDtypes) {
    if (dtype == known) return known;
    names.emplace_back(info(known).torch_name);
  }
  return unknown_dtype(text, names);
}

Result<FeasibilityRequest> request_of(const CheckOptions& options) {
  FeasibilityRequest request;
  request.degrees = TRY(parse_degrees(options.mesh));
  if (options.world > 0) request.world = options.world;
  if (options.sequence > 0) request.sequence = options.sequence;
  if (!options.dtype.empty()) request.memory.weights = TRY(find_dtype(options.dtype));
  request.memory.gradients = TRY(find_dtype(options.grad_dtype));
  return request;
}

// ---- words

// Returns "bfloat16", or several dtypes, and says if the config names none.
std::string dtype_text(const Checked& c) {
  std::vector<std::string> names;
  for (const Parameter& p : c.result.parameters) {
    if (p.is_scale) continue;
    const std::string name(info(weight_dtype(p, c.request.memory)).torch_name);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  const bool is_assumed = !c.request.memory.weights && !dtype_from_torch(c.config.dtype);
  return join(names, ", ") + (is_assumed ? " (the config names none)" : "");
}

// Returns whether --mesh has `dp`, which is taken as dp_shard.
bool took_dp_as_shard(const CheckOptions& options) {
  const std::vector<std::string> parts = split(options.mesh, ',');
  return std::any_of(parts.begin(), parts.end(), [](const std::string& p) { return p.starts_with("dp="); });
}

bool has_experts(const Checked& c) {
  return std::any_of(c.result.parameters.begin(), c.result.parameters.end(),
                     [](const Parameter& p) { return p.expert >= 0; });
}

std::string experts_text(const Degrees& degrees) {
  const auto sharding = expert_sharding(degrees);
  if (!sharding) return "ep does not multiply the number of ranks; it must divide dp_shard x cp";
  return "ep does not multiply the number of ranks; it is part of dp_shard x cp" +
         std::string(sharding->is_cut_by_tp ? "" : " x tp, and tp does not shard experts") + ", with " +
         count_of(sharding->shards, "FSDP shard") + " of each expert";
}

std::string stage_text(const StageMemory& stage) {
  std::vector<std::string> parts;
  if (stage.has_first) parts.emplace_back("embedding");
  if (stage.layers > 0)
    parts.push_back(stage.layers == 1 ? "layer " + std::to_string(stage.first_layer)
                                      : "layers " + std::to_string(stage.first_layer) + ".." +
                                            std::to_string(stage.first_layer + stage.layers - 1));
  if (stage.has_last) parts.emplace_back("head");
  return join(parts, ", ");
}

// Prints a row of the table: a number of parameters, then sizes.
void print_numbers(std::string_view label, const std::string& whose, const std::vector<std::string>& numbers) {
  std::string line = padded(whose, kWhose);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t width = i == 0 ? kElements : kBytes;
    line += std::string(width - std::min(width, width_of(numbers[i])), ' ') + numbers[i];
  }
  print_row(label, line);
}

std::vector<std::string> numbers_of(const RankMemory& m) {
  return {with_commas(m.parameters), human_bytes(m.weights), human_bytes(m.gradients), human_bytes(m.optimizer),
          human_bytes(m.total())};
}

// ---- the table of memory

using Stages = std::vector<StageMemory>;

bool are_alike(const StageMemory& a, const StageMemory& b) {
  const auto facts = [](const StageMemory& s) {
    return std::array{Index{s.has_first}, Index{s.has_last}, s.layers, s.largest.parameters, s.largest.total()};
  };
  return facts(a) == facts(b);
}

void print_stages(const Stages& stages) {
  std::size_t shown = 0;
  for (std::size_t i = 0; i < stages.size();) {
    std::size_t j = i;
    while (j + 1 < stages.size() && are_alike(stages[i], stages[j + 1])) ++j;
    if (shown++ == kShownStages) {
      print_row("", "... " + count_of(stages.size() - i, "more stage") + " (--json has all)");
      return;
    }
    const std::string whose = i == j ? "stage " + std::to_string(i) + ": " + stage_text(stages[i])
                                     : "stages " + std::to_string(i) + ".." + std::to_string(j) + ": " +
                                           count_of(stages[i].layers, "layer") + " each";
    print_numbers("", whose, numbers_of(stages[i].largest));
    i = j + 1;
  }
}

const StageMemory& with_largest(const Stages& stages) {
  return *std::max_element(stages.begin(), stages.end(), [](const StageMemory& a, const StageMemory& b) {
    return a.largest.total() < b.largest.total();
  });
}
const StageMemory& with_smallest(const Stages& stages) {
  return *std::min_element(stages.begin(), stages.end(), [](const StageMemory& a, const StageMemory& b) {
    return a.smallest.total() < b.smallest.total();
  });
}

// Describes what the table counts.
std::string assumptions_text(const Checked& c) {
  const Index shards = c.request.degrees.shards();
  return "Weights " + dtype_text(c) + ", gradients " + std::string(info(c.request.memory.gradients).torch_name) +
         ", Adam in float32 (two moments, and a master copy of what is not float32), " +
         (shards > 1 ? "all sharded by FSDP over dp_shard x cp = " + with_commas(shards) : "nothing sharded by FSDP") +
         ". " +
         (c.result.stages.size() > 1
              ? "Layers are assigned to stages as in torchtitan; embedding and head count as a layer each. "
              : "") +
         "Not counted: activations, communication buffers" +
         (c.config.num_prediction_layers() > 0 ? ", prediction layers" : "") + ".";
}

void print_memory(const Checked& c) {
  const Stages& stages = c.result.stages;
  if (stages.empty()) return;
  print_numbers("memory", "per rank", {"parameters", "weights", "gradients", "optimizer", "total"});
  if (stages.size() > 1) print_stages(stages);
  const StageMemory &most = with_largest(stages), &least = with_smallest(stages);
  const auto whose = [&](const char* which, const StageMemory& stage, Index rank) {
    return std::string(which) + ": rank " + with_commas(rank) +
           (stages.size() > 1 ? ", stage " + std::to_string(stage.stage) : "");
  };
  if (most.largest.total() == least.smallest.total()) {
    print_numbers("", "every rank", numbers_of(most.largest));
  } else {
    print_numbers("", whose("largest", most, most.largest.rank), numbers_of(most.largest));
    print_numbers("", whose("smallest", least, least.smallest.rank), numbers_of(least.smallest));
  }
  print_row("", in_column(assumptions_text(c), kIndent));
}

// ---- the report

void print_tensors(const Checked& c) {
  for (std::size_t i = 0; i < c.result.parameters.size();) {
    const Parameter& first = c.result.parameters[i];
    std::vector<std::string> names;
    Index elements = 0;
    std::size_t j = i;
    // Matrices alternate with their scales.
    for (; j < c.result.parameters.size() && c.result.parameters[j].rule == first.rule; ++j) {
      if (c.result.parameters[j].is_scale) continue;
      names.push_back(c.result.parameters[j].name);
      elements += volume(c.result.parameters[j].shape);
    }
    std::printf("%s  %s  %s  %s, %s\n", padded(folded(names), 52).c_str(),
                padded(std::string(info(weight_dtype(first, c.request.memory)).short_name), 5).c_str(),
                padded(to_string(first.shape), 16).c_str(), count_of(std::ssize(names), "tensor").c_str(),
                first.is_tied ? "tied: not stored" : count_of(elements, "parameter").c_str());
    i = j;
  }
  std::printf("\n");
}

void print_facts(const Checked& c) {
  const Index layers = c.config.num_hidden_layers();  // 0 if the config has them per part, as an encoder and a decoder
  print_row("check", c.config.path + "   " + std::string(c.family.title) + ", " +
                         (layers > 0 ? count_of(layers, "layer") + ", " : "") +
                         count_of(c.result.elements, "parameter"));
  const Degrees& degrees = c.request.degrees;
  print_row("mesh", to_string(degrees) +
                        (degrees.mesh.ranks() > 1 ? "   " + count_of(degrees.mesh.ranks(), "rank") : "") +
                        (took_dp_as_shard(c.options) ? ", dp taken as dp_shard" : ""));
  if (degrees.ep > 1 && has_experts(c)) print_row("", in_column(experts_text(degrees), kIndent));
  std::vector<std::string> padded_rows;
  for (const VocabularyPadding& p : c.result.paddings)
    if (p.rows != c.config.vocab_size())
      padded_rows.push_back(std::string(p.framework) + " pads it to " + with_commas(p.rows));
  if (!padded_rows.empty()) print_row("vocab", count_of(c.config.vocab_size(), "row") + "; " + join(padded_rows, ", "));
}

AuditReport report_of(const Checked& c, double seconds) {
  AuditReport report;
  report.title = "reshard check " + c.config.path;
  report.findings = c.result.findings;
  report.checks = c.result.checks;
  report.looked_at = count_of(std::ssize(c.result.parameters), "tensor") + " of the config checked";
  report.seconds = seconds;
  return report;
}

void print_text(const Checked& c, const AuditReport& report) {
  if (c.options.tensors) print_tensors(c);
  print_facts(c);
  print_findings(report);
  print_memory(c);
  print_summary(report);
}

Json to_json(const RankMemory& m) {
  return Json::object()
      .set("rank", m.rank)
      .set("parameters", m.parameters)
      .set("weights", m.weights)
      .set("gradients", m.gradients)
      .set("optimizer", m.optimizer)
      .set("total", m.total());
}

Json ranks_json(const Stages& stages) {
  if (stages.empty()) return {};
  Json list = Json::array();
  for (const StageMemory& s : stages)
    list.push_back(Json::object()
                       .set("stage", s.stage)
                       .set("first_layer", s.first_layer)
                       .set("layers", s.layers)
                       .set("largest", to_json(s.largest))
                       .set("smallest", to_json(s.smallest)));
  return Json::object()
      .set("largest", to_json(with_largest(stages).largest))
      .set("smallest", to_json(with_smallest(stages).smallest))
      .set("stages", std::move(list));
}

Json tensors_json(const Checked& c) {
  Json out = Json::array();
  for (const Parameter& p : c.result.parameters) {
    if (p.is_scale && c.request.memory.weights) continue;
    out.push_back(Json::object()
                      .set("name", p.name)
                      .set("shape", dims_json(p.shape))
                      .set("dtype", info(weight_dtype(p, c.request.memory)).torch_name)
                      .set("tied", p.is_tied));
  }
  return out;
}

Json to_json(const Checked& c, const AuditReport& report, Severity threshold) {
  const auto number_or_null = [](const std::optional<Index>& n) { return n ? Json(*n) : Json(); };
  const Degrees& degrees = c.request.degrees;
  Json mesh = Json::object();
  for (const std::string_view axis : kMeshAxes) mesh.set(axis, degrees.size(axis));
  Json paddings = Json::array();
  for (const VocabularyPadding& p : c.result.paddings)
    paddings.push_back(Json::object().set("framework", p.framework).set("multiple", p.multiple).set("rows", p.rows));
  Json out = answer_json("check");
  out.set("config", c.config.path).set("family", c.family.name).set("mesh", std::move(mesh));
  out.set("dp_taken_as", took_dp_as_shard(c.options) ? Json("dp_shard") : Json());
  out.set("mesh_ranks", degrees.mesh.ranks()).set("world", number_or_null(c.request.world));
  out.set("sequence", number_or_null(c.request.sequence)).set("parameters", c.result.elements);
  out.set("padded_vocabulary", std::move(paddings)).set("ranks", ranks_json(c.result.stages));
  add_findings(out, report, threshold);
  if (c.options.tensors) out.set("tensors", tensors_json(c));
  return out;
}

Result<int> check(const CheckOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const Severity threshold = TRY(options.findings.threshold());
  FeasibilityRequest request = TRY(request_of(options));
  const ModelChoice choice = TRY(options.model.choice());
  const ModelConfig config = TRY(read_config(options.model.config, choice.families));
  const Family* family = TRY(family_of(config, choice));
  Feasibility result = TRY(check_feasibility(*family, config, request));
  const Checked checked{options, *family, config, std::move(request), std::move(result)};
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const AuditReport report = report_of(checked, seconds);
  if (options.findings.json)
    show_json(to_json(checked, report, threshold), 1);
  else
    print_text(checked, report);
  if (!options.findings.html.empty())
    TRY(write_html(options.findings.html, "check", {facts_of_file(checked.config.path)},
                   to_json(checked, report, threshold)));
  return conclude(report, options.findings);
}

}  // namespace

void add_check(CommandLine& line) {
  auto options = std::make_shared<CheckOptions>();
  options->model.add_without_names(line);
  line.option("--config").required().described_as("Model's config.json");
  line.group("Checks");
  line.add_option("--mesh", options->mesh, "Degrees of parallelism: pp, dp_replicate, dp_shard (or dp), cp, tp, ep")
      .takes("MESH")
      .common()
      .required();
  line.add_option("--world", options->world, "Number of ranks that the degrees must multiply to")
      .common()
      .within(Index{1}, kMaxMeshRanks);
  line.add_option("--sequence", options->sequence, "Tokens per sequence, checked against cp and tp")
      .common()
      .within(Index{1}, Index{1} << 40);
  line.add_option("--dtype", options->dtype, "Dtype of the weights in memory (default: the config's)")
      .takes("DTYPE")
      .common()
      .completes({"float32", "bfloat16", "float16"});
  line.add_option("--grad-dtype", options->grad_dtype, "Dtype of the gradients")
      .takes("DTYPE")
      .completes({"float32", "bfloat16", "float16"})
      .shows_default();
  line.group("Report");
  line.add_flag("--tensors", options->tensors, "List the model's tensors");
  options->findings.add(line);
  line.examples(
      {{"reshard check --config config.json --mesh tp=16 --world 16", ""},
       {"reshard check --config config.json --mesh pp=16,cp=16,dp=8,tp=8 --world 16384 --sequence 131072", ""}});
  line.description("No checkpoint is needed. Exits with 1 if there are findings of the --fail-on severity.");
  line.action([options] { return check(*options); });
}

}  // namespace reshard::tools
