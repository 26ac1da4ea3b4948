// SPDX-License-Identifier: Apache-2.0
// Finds out without NCCL whether ranks can use it: NCCL's own errors come late and are hard to understand.
#include <map>
#include <utility>

#include "lib/transport/collectives.h"
#include "lib/transport/nccl.h"

namespace reshard {
namespace {

constexpr char kBetween = '\n';

std::string as_text(const NcclMember& member) { return member.machine + kBetween + member.gpu + kBetween + member.why; }

NcclMember from_text(const std::string& text) {
  const std::size_t gpu = text.find(kBetween) + 1, why = text.find(kBetween, gpu) + 1;
  return {text.substr(0, gpu - 1), text.substr(gpu, why - gpu - 1), text.substr(why)};
}

}  // namespace

std::string why_no_nccl(const std::vector<NcclMember>& members) {
  std::map<std::string, std::size_t> rank_of_gpu;
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const NcclMember& member = members[rank];
    if (!member.why.empty()) return "rank " + std::to_string(rank) + ": " + member.why;
    const auto [first, is_new] = rank_of_gpu.emplace(member.gpu, rank);
    if (!is_new)
      return "ranks " + std::to_string(first->second) + " and " + std::to_string(rank) + " have the same GPU, " +
             member.gpu + " of " + member.machine + "; start at most one rank per GPU";
  }
  return "";
}

Result<std::string> why_no_nccl(Transport& control, int device) {
  std::vector<NcclMember> members;
  for (const std::string& text : TRY(gather(&control, as_text(nccl_member(device)))))
    members.push_back(from_text(text));
  return broadcast(&control, why_no_nccl(members));
}

}  // namespace reshard
