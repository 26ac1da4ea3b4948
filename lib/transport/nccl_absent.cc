// SPDX-License-Identifier: Apache-2.0
// Replaces nccl.cc in a build without NCCL.
#include "lib/transport/nccl.h"

namespace reshard {
namespace {

Error absent() { return unsupported("nccl: reshard was built without NCCL; configure with -DRESHARD_NCCL=ON"); }

}  // namespace

Result<std::string> nccl_version() { return absent(); }

Result<NcclId> make_nccl_id() { return absent(); }

Result<std::unique_ptr<NcclRanks>> open_nccl(const NcclId&, int, int, const NcclOptions&, const Transport*) {
  return absent();
}

Result<std::unique_ptr<NcclRanks>> open_nccl(Transport&, const NcclOptions&) { return absent(); }

NcclMember nccl_member(int) { return {"", "", absent().message()}; }

}  // namespace reshard
