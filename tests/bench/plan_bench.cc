// How long it takes to plan a reshard of Llama 3.1 405B with its optimizer state between two meshes, each described and
// not written down: all ranks' parts on one thread and on two, and one rank's own part made from nothing. Every time is
// the median of 7 rounds. Memory is what the process grows by.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "lib/family/placement.h"
#include "lib/plan/rank_plan.h"

namespace reshard {
namespace {

constexpr int kRounds = 7;
constexpr Index kSampledRanks = 97;

double milliseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

double median_time(const std::function<void()>& body) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) times.push_back(milliseconds(body));
  return median(std::move(times));
}

// "VmRSS" or "VmHWM", in megabytes.
double memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) * 1024 / 1e6;
  return 0;
}

// Makes the high-water mark of memory the present use.
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// The tensors of a config's model as torchtitan saves them under mixed precision: bf16 weights, and in float32 a master
// copy and Adam's two moments of each: 14 bytes a parameter.
Result<Catalog> model_with_optimizer(const std::string& config_path) {
  std::ostringstream text;
  text << std::ifstream(config_path).rdbuf();
  const ModelConfig config = TRY(ModelConfig::parse(TRY(parse_json(text.str(), config_path)), config_path));
  const Family* family = family_of_model_type(config.model_type);
  if (!family) return unsupported(config_path + ": of no family known");
  Catalog catalog;
  const auto add = [&](std::string name, DType dtype, const Dims& shape) {
    Tensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = dtype;
    tensor.shape = shape;
    return catalog.add(std::move(tensor));
  };
  for (const Parameter& p : TRY(parameters(*family, config))) {
    TRY(add(p.name, DType::kBFloat16, p.shape));
    for (const char* state : {".exp_avg", ".exp_avg_sq", ".master"})
      TRY(add("optimizer.state." + p.name + state, DType::kFloat32, p.shape));
  }
  return catalog;
}

Result<PlacedModel> placed(const Catalog& model, const std::string& mesh_text) {
  const Mesh mesh = TRY(Mesh::parse(mesh_text));
  const Placer placer = TRY(Placer::make(mesh, &kLlamaFamily, nullptr, model));
  return place_model(model, mesh, [&](const Tensor& t) -> Result<Placement> { return placer.place(t); });
}

Index box_count(const PlacedModel& model) {
  Index boxes = 0;
  for (const PlacedTensor& t : model.tensors) {
    Index n = 1;
    for (const Split& split : t.placement.splits)
      for (const std::string& axis : split.axes) n *= model.mesh.size(axis);
    boxes += n;
  }
  return boxes;
}

// What a checkpoint of the source records: a file a rank.
Result<Catalog> recorded(const PlacedModel& model) {
  Catalog out;
  out.files.resize(static_cast<std::size_t>(model.mesh.ranks()));
  for (const PlacedTensor& t : model.tensors) {
    Tensor tensor;
    tensor.name = t.name;
    tensor.dtype = t.dtype;
    tensor.shape = t.shape;
    tensor.fragments = FragmentList(t.shape.rank());
    for (Index rank = 0; rank < model.mesh.ranks(); ++rank)
      if (is_first_replica(model.mesh, t.placement, rank))
        for (const LocalBox& piece : owned_boxes(model.mesh, t.placement, t.shape, rank))
          tensor.fragments.add(piece.box, {static_cast<std::uint32_t>(rank), 0, 0});
    TRY(out.add(std::move(tensor)));
  }
  return out;
}

struct OwnPart {
  double median_ms = 0, worst_ms = 0;
  Index most_moves = 0;
};

// One rank's own part from nothing, for ranks spread over the mesh: each is one round.
template <class Source>
OwnPart own_parts(const Source& source, const PlacedModel& target) {
  std::vector<double> times;
  OwnPart out;
  const Index ranks = target.mesh.ranks();
  for (Index k = 0; k < kSampledRanks; ++k) {
    const Index rank = k * (ranks - 1) / (kSampledRanks - 1);
    std::vector<double> rounds;
    for (int round = 0; round < kRounds; ++round)
      rounds.push_back(milliseconds([&] {
        const auto plan = RankPlan::make(source, target, {Holders::kFirst, Holders::kAll, rank});
        const RankPart part = plan->into(rank);
        out.most_moves = std::max(out.most_moves, static_cast<Index>(part.moves.size()));
      }));
    times.push_back(median(std::move(rounds)));
  }
  out.median_ms = median(times);
  out.worst_ms = *std::max_element(times.begin(), times.end());
  return out;
}

Status report(const Catalog& model, const std::string& from, const std::string& to) {
  const PlacedModel source = TRY(placed(model, from)), target = TRY(placed(model, to));
  forget_peak();
  const double before = memory("VmRSS");
  RankPlanFigures figures;
  const auto plan_all = [&](int threads) {
    return median_time([&] { figures = RankPlan::make(source, target, {})->all(threads); });
  };
  TRY(RankPlan::make(source, target, {}));
  const double one = plan_all(1), two = plan_all(2);
  const double grown = memory("VmHWM") - before;
  const OwnPart own = own_parts(source, target);
  std::printf("%6lld %-28s %5lld %-28s %9lld %9lld %7.0f %7.0f %6.1f %7.2f %7.2f %6lld %7.2f %7.2f  %s\n",
              static_cast<long long>(source.mesh.ranks()), from.c_str(), static_cast<long long>(target.mesh.ranks()),
              to.c_str(), static_cast<long long>(box_count(source)), static_cast<long long>(figures.moves), one, two,
              grown, own.median_ms, own.worst_ms, static_cast<long long>(own.most_moves), 100 * imbalance(figures.into),
              100 * imbalance(figures.out_of), figures.digest.hex().substr(0, 8).c_str());
  std::fflush(stdout);
  return {};
}

// The same from a checkpoint's metadata in memory.
Status report_recorded(const Catalog& model, const std::string& from, const std::string& to) {
  const PlacedModel source = TRY(placed(model, from)), target = TRY(placed(model, to));
  const Catalog catalog = TRY(recorded(source));
  forget_peak();
  const double before = memory("VmRSS");
  RankPlanFigures figures;
  TRY(RankPlan::make(catalog, target, {}));
  const double two = median_time([&] { figures = RankPlan::make(catalog, target, {})->all(2); });
  const double grown = memory("VmHWM") - before;
  const OwnPart own = own_parts(catalog, target);
  std::printf(
      "recorded boxes, %s -> %s: all ranks on two threads %.0f ms, +%.1f MB; one rank %.2f ms, worst %.2f ms; %lld "
      "moves\n",
      from.c_str(), to.c_str(), two, grown, own.median_ms, own.worst_ms, static_cast<long long>(figures.moves));
  return {};
}

Status run(const std::string& config) {
  const Catalog model = TRY(model_with_optimizer(config));
  std::printf("%zu tensors, %.2f TB\n\n", model.tensors().size(), static_cast<double>(model.tensor_bytes()) / 1e12);
  std::printf("%6s %-28s %5s %-28s %9s %9s %7s %7s %6s %7s %7s %6s %7s %7s  %s\n", "source", "mesh", "to", "mesh",
              "boxes", "moves", "1 thr", "2 thr", "+MB", "own ms", "worst", "moves", "% into", "% from", "digest");
  const char* kSources[] = {"pp=16,cp=8,tp=8", "pp=16,dp_shard=8,cp=4,tp=8", "pp=16,dp_shard=8,cp=16,tp=8"};
  const char* kTargets[] = {"pp=16,tp=8", "pp=8,dp_shard=32,tp=4", "pp=16,dp_shard=64,tp=4"};
  for (const char* from : kSources)
    for (const char* to : kTargets) TRY(report(model, from, to));
  // Shapes that the mesh does not divide, and a source that several ranks hold.
  TRY(report(model, "pp=16,dp_shard=8,cp=16,tp=8", "pp=16,dp_shard=100,tp=8"));
  TRY(report(model, "pp=16,dp_shard=8,cp=16,tp=8", "dp_shard=1024"));
  std::printf("\n");
  return report_recorded(model, kSources[2], kTargets[1]);
}

}  // namespace
}  // namespace reshard

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s tests/data/configs/llama-3.1-405b.json\n", argv[0]);
    return 2;
  }
  const reshard::Status status = reshard::run(argv[1]);
  if (!status) std::fprintf(stderr, "%s\n", status.error().message().c_str());
  return status ? 0 : 1;
}
