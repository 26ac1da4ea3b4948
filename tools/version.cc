// reshard --version: what this program is, what is built in, and what of it is found on this machine.
#include "formats/registry.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/codec.h"
#include "lib/device/cuda/cuda_device.h"
#include "lib/device/cuda/cufile.h"
#include "lib/transport/job.h"
#include "lib/transport/nccl.h"
#include "tools/commands.h"
#include "tools/fuse.h"

namespace reshard::tools {
namespace {

// "found", what it calls itself; or "missing", and why.
Json found(const Result<std::string>& version) {
  Json out = Json::object();
  return version ? out.set("found", *version) : out.set("missing", printable(version.error().message()));
}

Result<std::string> cufile_state() {
  TRY(load_cufile(kCuFileLibrary, kCuFileNeeds));
  return std::string(kCuFileLibrary);
}

}  // namespace

std::string version_text(bool json) {
  const std::string version = RESHARD_VERSION;
  if (!json) return "reshard " + version;
  Json table = Json::array();
  for (const Format* f : formats()) {
    Json row = Json::object();
    row.set("name", f->name).set("title", f->title).set("reads", f->open != nullptr);
    row.set("writes", f->lay_out != nullptr || f->write_view != nullptr);
    if (f->library) row.set("library", f->library());
    table.push_back(std::move(row));
  }
  Json out = answer_json("version");
  out.set("reshard", version)
      .set("formats", std::move(table))
      .set("zstd", found(zstd_version()))
      .set("mpi", found(mpi_version()))
      .set("cuda", found(cuda_version()))
      .set("nccl", found(nccl_version()))
      .set("cufile", found(cufile_state()))
      .set("fuse", found(fuse_version()));
  return to_text(out, 2);
}

}  // namespace reshard::tools
