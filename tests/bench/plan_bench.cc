// How long it takes to plan a reshard of Llama 3.1 405B with its optimizer state between two meshes, each described and
// not written down: all ranks' parts on one thread and on two, and one rank's own part made from nothing but the two
// descriptions (median and worst of ranks spread over the mesh). Every time is the median of 7 rounds.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "lib/base/text.h"
#include "lib/plan/cost.h"
#include "lib/plan/rank_plan.h"
#include "tests/bench/described_models.h"

namespace reshard {
namespace {

constexpr int kRounds = 7;
constexpr Index kSampledRanks = 33;

// Milliseconds.
struct Time {
  double wall = 0;
  double cpu = 0;  // of all threads: what a busy machine changes less
};

double now(clockid_t clock) {
  timespec t{};
  ::clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

Time median_time(const std::function<void()>& body) {
  std::vector<double> wall, cpu;
  for (int round = 0; round < kRounds; ++round) {
    const double wall_start = now(CLOCK_MONOTONIC), cpu_start = now(CLOCK_PROCESS_CPUTIME_ID);
    body();
    wall.push_back(now(CLOCK_MONOTONIC) - wall_start);
    cpu.push_back(now(CLOCK_PROCESS_CPUTIME_ID) - cpu_start);
  }
  return {median(std::move(wall)), median(std::move(cpu))};
}

// The process's largest memory so far, in megabytes.
double peak_megabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) * 1024 / 1e6;
  return 0;
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

struct OwnPart {
  Time median;
  double worst_wall = 0;
  Index most_moves = 0;
};

template <class Source>
OwnPart own_parts(const Source& source, const PlacedModel& target) {
  std::vector<double> wall, cpu;
  OwnPart out;
  for (Index k = 0; k < kSampledRanks; ++k) {
    const Index rank = k * (target.mesh.ranks() - 1) / (kSampledRanks - 1);
    const Time time = median_time([&] {
      const auto plan = RankPlan::make(source, target, {Holders::kFirst, Holders::kAll, rank});
      out.most_moves = std::max(out.most_moves, static_cast<Index>(plan->into(rank).moves.size()));
    });
    wall.push_back(time.wall);
    cpu.push_back(time.cpu);
  }
  out.worst_wall = *std::max_element(wall.begin(), wall.end());
  out.median = {median(std::move(wall)), median(std::move(cpu))};
  return out;
}

// `source` is what the plan is made from, `described` how its ranks lie.
template <class Source>
Status report(const std::string& what, const Source& source, const PlacedModel& described, const PlacedModel& target) {
  RankPlanFigures figures;
  TRY(RankPlan::make(source, target, {}));
  const auto plan_all = [&](int threads) {
    return median_time([&] { figures = RankPlan::make(source, target, {})->all(threads); });
  };
  const Time one = plan_all(1), two = plan_all(2);
  const OwnPart own = own_parts(source, target);
  std::printf("| %s | %s | %s | %s | %s | %.0f | %.0f | %.0f | %.1f | %.1f | %.1f | %s | %.2f | %.2f | %.0f |\n",
              with_commas(described.mesh.ranks()).c_str(), with_commas(box_count(described)).c_str(),
              with_commas(target.mesh.ranks()).c_str(), what.c_str(), with_commas(figures.moves).c_str(), one.wall,
              two.wall, one.cpu, own.median.wall, own.worst_wall, own.median.cpu, with_commas(own.most_moves).c_str(),
              100 * imbalance(figures.into), 100 * imbalance(figures.out_of), peak_megabytes());
  std::fflush(stdout);
  return {};
}

// What it takes to fill in the cost model.
Status report_work(const Catalog& source, const Catalog& target) {
  const Plan plan = TRY(make_plan(source, target));
  const Time convert = median_time([&] { (void)job_work(plan, source, target, 128, JobKind::kConvert); });
  const Time load = median_time([&] { (void)job_work(plan, source, target, 128, JobKind::kLoad); });
  std::printf("\njob_work of the recorded boxes to 128 ranks: converting %.0f ms, loading %.0f ms (CPU %.0f, %.0f)\n",
              convert.wall, load.wall, convert.cpu, load.cpu);
  return {};
}

Status run(const std::string& config) {
  const Catalog model = TRY(model_of(config, true));
  const char* kSources[] = {"pp=16,cp=8,tp=8", "pp=16,dp_shard=8,cp=4,tp=8", "pp=16,dp_shard=8,cp=16,tp=8"};
  const char* kTargets[] = {"pp=16,tp=8", "pp=8,dp_shard=32,tp=4", "pp=16,dp_shard=64,tp=4"};
  const Time describing = median_time([&] { (void)placed(model, kSources[2]); });
  std::printf("%zu tensors, %.2f TB; describing one side by the family's rules: %.1f ms, CPU %.1f ms\n\n",
              model.tensors().size(), static_cast<double>(model.tensor_bytes()) / 1e12, describing.wall,
              describing.cpu);
  std::printf(
      "| from ranks | boxes | to ranks | | moves | all ms: 1 thread | 2 threads | CPU | one rank ms | worst | CPU | "
      "moves "
      "| imbalance %% | of files | peak MB |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const char* from : kSources)
    for (const char* to : kTargets) {
      const PlacedModel source = TRY(placed(model, from));
      TRY(report(to, source, source, TRY(placed(model, to))));
    }
  // What does not divide the shapes, and what is cut otherwise throughout; and from metadata as a checkpoint has them.
  const PlacedModel source = TRY(placed(model, kSources[2]));
  for (const char* to : {"pp=16,dp_shard=100,tp=8", "dp_shard=1024"})
    TRY(report(to, source, source, TRY(placed(model, to))));
  const Catalog catalog = TRY(recorded(source));
  TRY(report(std::string("recorded: ") + kTargets[1], catalog, source, TRY(placed(model, kTargets[1]))));
  return report_work(catalog, TRY(recorded(TRY(placed(model, kTargets[0])))));
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
