// What the cost model says of a few large jobs, on a file system of 40 GB/s and on one of 2 TB/s: the table in
// docs/scaling.md. Nothing is measured here.
#include <cstdio>

#include "lib/base/text.h"
#include "lib/plan/cost.h"
#include "tests/bench/described_models.h"

namespace reshard {
namespace {

// A file system and a network of today's large clusters: what Llama 3 was trained on, and a 400 Gb/s link a GPU whose
// messages a kernel packs.
CostParameters large_cluster() {
  CostParameters p;
  p.file_system = 2e12;
  p.network = 48e9;
  p.copy = 2.1e12;
  return p;
}

std::string shown(const Estimate& e) { return human_seconds(e.slowest()) + " to " + human_seconds(e.seconds()); }

void print(const std::string& job, const JobWork& work) {
  std::printf("| %s | %s | %.1f | %s | %s |", job.c_str(), with_commas(work.ranks).c_str(),
              static_cast<double>(work.direct.total_bytes_read) / static_cast<double>(work.source_bytes),
              with_commas(work.direct.total_opens).c_str(), with_commas(work.exchange.total_opens).c_str());
  for (const CostParameters& parameters : {CostParameters(), large_cluster()}) {
    const Choice choice = choose(work, parameters);
    std::printf(" %s | %s | %s |", shown(choice.direct).c_str(), shown(choice.exchange).c_str(),
                std::string(strategy_name(choice.strategy)).c_str());
  }
  std::printf("\n");
}

struct Example {
  std::string what, config;
  bool with_optimizer;
  std::string from, to;
  std::vector<Index> ranks;
  JobKind kind;
};

Status report(const std::string& configs, const Example& e) {
  const Catalog model = TRY(model_of(configs + "/" + e.config, e.with_optimizer));
  const PlacedModel from = TRY(placed(model, e.from)), to = TRY(placed(model, e.to));
  const Catalog source = TRY(recorded(from)), target = TRY(recorded(to));
  const Plan plan = TRY(make_plan(source, target));
  for (const Index ranks : e.ranks) print(e.what, job_work(plan, source, target, ranks, e.kind));
  return {};
}

// From the memory of GPUs to that of the same GPUs: no files.
void print_live(const std::string& job, Index bytes, Index ranks, double network) {
  CostParameters p = large_cluster();
  p.network = network;
  Work work;
  work.bytes_sent = work.bytes_received = bytes / ranks * (ranks - 1) / ranks;
  work.messages = ranks - 1;
  const Estimate e = estimate(work, p);
  std::printf("| %s | %lld | %.1f GB | %.0f GB/s | %.0f ms | %.0f ms |\n", job.c_str(), static_cast<long long>(ranks),
              static_cast<double>(work.bytes_sent) / 1e9, network / 1e9, 1e3 * e.traffic, 1e3 * e.copies);
}

Status run(const std::string& configs) {
  const std::string large = "llama-3.1-405b.json", medium = "llama-3.1-70b.json";
  std::printf(
      "| job | ranks | direct reads each byte | opens, direct | exchange | 40 GB/s: direct | exchange | choice | "
      "2 TB/s: direct | exchange | choice |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  TRY(report(configs,
             {"convert 70B weights, 128 files to 1", medium, false, "dp_shard=16,tp=8", "tp=1", {16}, JobKind::kConvert}));
  TRY(report(configs, {"convert 405B with optimizer, 16,384 files to 1,024",
                       large,
                       true,
                       "pp=16,dp_shard=8,cp=16,tp=8",
                       "pp=8,dp_shard=32,tp=4",
                       {128, 1024},
                       JobKind::kConvert}));
  TRY(report(configs, {"load 70B from whole tensors, TP=8", medium, false, "tp=1", "tp=8", {8}, JobKind::kLoad}));
  TRY(report(configs, {"load 405B weights of 16,384 files, 128 x TP=8 x PP=2",
                       large,
                       false,
                       "pp=16,dp_shard=8,cp=16,tp=8",
                       "pp=2,dp_replicate=128,tp=8",
                       {2048},
                       JobKind::kLoad}));
  std::printf(
      "\n| live reshard | GPUs | sent by each | link | traffic | pack and unpack |\n|---|---|---|---|---|---|\n");
  print_live("70B, NVLink", 141'107'412'992, 8, 370e9);
  print_live("405B, NDR InfiniBand", 811'706'777'600, 16, 48e9);
  return {};
}

}  // namespace
}  // namespace reshard

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s tests/data/configs\n", argv[0]);
    return 2;
  }
  const reshard::Status status = reshard::run(argv[1]);
  if (!status) std::fprintf(stderr, "%s\n", status.error().message().c_str());
  return status ? 0 : 1;
}
