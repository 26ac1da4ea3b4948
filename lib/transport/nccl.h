// Ranks on GPUs: messages between the memories of GPUs, over NCCL. The library is opened when it is first wanted, so
// that a machine without it runs everything else. Implemented by nccl.cc, or by nccl_absent.cc where it is not built.
//
// Messages lie in device memory, and what made their contents was waited for. What ranks tell each other from host
// memory (collectives.h) goes over the transport of the job.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lib/transport/transport.h"

namespace reshard {

struct NcclOptions {
  int device = 0;         // the GPU of this rank, as CUDA counts
  double patience = 600;  // seconds for one transfer, or for coming together, before a rank gives up
};

// That of the library that is found, "2.28.3"; an error says why there is none.
Result<std::string> nccl_version();

// What names a group of ranks; made by one of them, the same on all.
using NcclId = std::array<std::byte, 128>;
Result<NcclId> make_nccl_id();

// Ranks with a GPU each. What is destroyed without part() is aborted, for all: a rank that fails need not wait for the
// others, and they not for it.
class NcclRanks : public Transport {
 public:
  // The last call of every rank, after its last transfer. Returns when all have made it.
  virtual Status part() = 0;
};

// Rank `rank` of `size`, each on a GPU of its own. Returns when all have called it with the same id. Whoever waits
// looks at `control` as well, so that a failure elsewhere ends it; null: there is none. `control` outlives what is
// returned, and that its transfers. A transfer that ends before it was waited for ends them all.
Result<std::unique_ptr<NcclRanks>> open_nccl(const NcclId& id, int rank, int size, const NcclOptions& options,
                                             const Transport* control);

// The same for all ranks of `control`, over which the id travels.
Result<std::unique_ptr<NcclRanks>> open_nccl(Transport& control, const NcclOptions& options);

// Why the ranks of `control` cannot open NCCL: one has no GPU (`device` is -1 there) or no library, or two have the
// same GPU. Empty: they can. All call it, over `control` alone, and get the same.
Result<std::string> why_no_nccl(Transport& control, int device);

// What each of them says of itself; why_no_nccl() compares.
struct NcclMember {
  std::string machine;
  std::string gpu;  // what names it in all the world
  std::string why;  // why it cannot; empty: it can
};
NcclMember nccl_member(int device);
std::string why_no_nccl(const std::vector<NcclMember>& members);

}  // namespace reshard
