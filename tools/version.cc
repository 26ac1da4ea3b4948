// SPDX-License-Identifier: Apache-2.0
// reshard --version: the program's version, the formats it knows and the optional parts it has.
#include "formats/registry.h"
#include "lib/base/json.h"
#include "lib/base/storage/http.h"
#include "lib/base/text.h"
#include "lib/device/codec.h"
#include "lib/device/cuda/cuda_device.h"
#include "lib/device/cuda/cufile.h"
#include "lib/transport/job.h"
#include "lib/transport/nccl.h"
#include "tools/build_parts.h"
#include "tools/commands.h"
#include "tools/fuse.h"

namespace reshard::tools {
namespace {

// {"found": the library's version} or {"missing": why}.
Json found(const Result<std::string>& version) {
  Json out = Json::object();
  return version ? out.set("found", *version) : out.set("missing", printable(version.error().message()));
}

Result<std::string> cufile_state() {
  TRY(load_cufile(kCuFileLibrary, kCuFileNeeds));
  return std::string(kCuFileLibrary);
}

}  // namespace

std::vector<BuildPart> build_parts() {
  return {{"zstd", zstd_version()},   {"mpi", mpi_version()},   {"cuda", cuda_version()},   {"nccl", nccl_version()},
          {"cufile", cufile_state()}, {"fuse", fuse_version()}, {"buckets", http_version()}};
}

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
  out.set("reshard", version).set("formats", std::move(table));
  for (const BuildPart& part : build_parts()) out.set(part.name, found(part.version));
  return to_text(out, 2);
}

}  // namespace reshard::tools
