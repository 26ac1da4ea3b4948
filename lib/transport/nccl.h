// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs: messages between GPU memories over NCCL. The library is loaded on first use, so that a machine without
// it runs everything else. Implemented by nccl.cc, or by nccl_absent.cc in a build without NCCL.
//
// Messages are in device memory, and the work that produced them must have completed. Data in host memory
// (collectives.h) goes over the job's own transport.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lib/transport/transport.h"

namespace reshard {

struct NcclOptions {
  int device = 0;         // this rank's GPU, as numbered by CUDA
  double patience = 600;  // seconds for one transfer, or for connecting, before a rank gives up
};

// Returns the version of the NCCL library found, "2.28.3", or an error that says why there is none.
Result<std::string> nccl_version();

// The ID of a group of ranks: made by one of them and passed to all.
using NcclId = std::array<std::byte, 128>;
Result<NcclId> make_nccl_id();

// A group of ranks with a GPU each. Destroying it without part() aborts it for all, so that a failing rank and the
// others need not wait for each other.
class NcclRanks : public Transport {
 public:
  // Leaves the group; the last call of every rank, after its last transfer. Returns once all have called it.
  virtual Status part() = 0;
};

// Connects rank `rank` of `size`, each on its own GPU. Returns once all have called it with the same ID. Waiting ranks
// also watch `control`, so that a failure elsewhere ends the wait; it may be null and must outlive the result and its
// transfers. Destroying a transfer before it was waited for aborts all transfers.
Result<std::unique_ptr<NcclRanks>> open_nccl(const NcclId& id, int rank, int size, const NcclOptions& options,
                                             const Transport* control);

// Connects all ranks of `control`, over which the ID is broadcast.
Result<std::unique_ptr<NcclRanks>> open_nccl(Transport& control, const NcclOptions& options);

// Returns why the ranks of `control` cannot use NCCL, or an empty string if they can: a rank has no GPU (`device` is
// -1) or no library, or two share a GPU. Collective over `control`; all ranks get the same answer.
Result<std::string> why_no_nccl(Transport& control, int device);

// What one rank reports for why_no_nccl().
struct NcclMember {
  std::string machine;
  std::string gpu;  // globally unique name of the GPU
  std::string why;  // why it cannot use NCCL; empty if it can
};
NcclMember nccl_member(int device);
std::string why_no_nccl(const std::vector<NcclMember>& members);

}  // namespace reshard
