// SPDX-License-Identifier: Apache-2.0
// Stands for fuse.cc in a program built without libfuse's headers.
#include "tools/fuse.h"

namespace reshard::tools {

Result<std::string> fuse_version() {
  return unsupported(
      "this reshard was built without FUSE: build it with -DRESHARD_FUSE=ON, for which it needs the headers of libfuse "
      "3 (Debian: libfuse3-dev)");
}

Status serve_image(const Listing&, const MakeImage&, const FuseOptions&) { return fuse_version().error(); }

}  // namespace reshard::tools
