#include "tools/job.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <set>
#include <string>

#include "lib/transport/collectives.h"
#include "lib/transport/nccl.h"

namespace reshard::tools {
namespace {

std::unique_ptr<Job> current;
bool together = false;

int say(const Error& error) {
  std::fflush(stdout);
  const Transport* ranks = current ? current->ranks() : nullptr;
  const std::string rank = ranks ? "[" + std::to_string(ranks->rank()) + "]" : "";
  std::fprintf(stderr, "reshard%s: error: %s\n", rank.c_str(), error.message().c_str());
  return static_cast<int>(error.code());
}

}  // namespace

Job& job() {
  if (!current) current = job_of_one();
  return *current;
}

Transport* job_ranks() { return together ? job().ranks() : nullptr; }

bool leads() { return rank_of(job_ranks()) == 0; }

Result<Index> machine_count() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  const auto names = TRY(gather(job_ranks(), name.data()));
  const std::set<std::string> different(names.begin(), names.end());
  return static_cast<Index>(std::stoll(TRY(broadcast(job_ranks(), std::to_string(different.size())))));
}

Result<Device*> job_device(const std::string& name, Index memory_cap) {
  static std::unique_ptr<Device> opened;
  if (opened) return opened.get();
  opened = TRY(open_device(name, memory_cap, job_ranks() ? local_rank(process_environment) : 0));
  return opened.get();
}

Result<Transport*> job_nccl(const Device& device) {
  static std::unique_ptr<Transport> opened;
  if (!opened && job_ranks()) opened = TRY(open_nccl(*job_ranks(), {.device = device.ordinal()}));
  return opened.get();
}

int run_in_job(const Action& action, bool everywhere, double patience) {
  auto joined = join_job({.patience = patience, .interrupt = &interrupted()});
  if (!joined) return say(joined.error());
  current = std::move(*joined);
  together = everywhere;
  const bool first = rank_of(current->ranks()) == 0;
  if (!first && std::freopen("/dev/null", "w", stdout) == nullptr) return say(io_error("/dev/null: cannot open"));
  const Result<int> result = current->run([&]() -> Result<int> { return first || everywhere ? action() : 0; });
  return current->end(result ? *result : say(result.error()));
}

}  // namespace reshard::tools
