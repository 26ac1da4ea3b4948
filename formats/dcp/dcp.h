// SPDX-License-Identifier: Apache-2.0
// PyTorch Distributed Checkpoint: a directory of `.metadata` and `__R_K.distcp` files, written by
// torch.distributed.checkpoint.save (FSDP2, HSDP, tensor and pipeline parallelism; torchtitan).
//
//   .metadata            the item and file of each box of each tensor             (metadata.h)
//   __<rank>_<k>.distcp  items one after the other, each a torch.save archive of one tensor chunk or one object
//                        (formats/encoding/torch_archive.h), possibly inside a zstd frame; or, with
//                        SerializationFormat.SAFETENSORS, one safetensors blob for each file
//
// Mesh and placements are not recorded. Producer: torch/distributed/checkpoint/filesystem.py. See docs/formats/dcp.md.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kDcpFormat;

namespace dcp {

inline constexpr std::string_view kMetadataFile = ".metadata";
inline constexpr std::string_view kDataEnding = ".distcp";
inline constexpr std::string_view kUnfinishedMetadata = ".metadata.tmp";  // the save died before its last rename
// The modules of torch's classes.
inline constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr std::string_view kFilesystemModule = "torch.distributed.checkpoint.filesystem";
// Returns whether this is "__3.metadata", of a rank that saved on its own (torch >= 2.9, use_collectives=False).
bool is_rank_metadata(std::string_view name);
// Returns whether the path is .metadata or a data file next to it, which stands for their directory.
Result<bool> is_file_of_directory(const PathSnapshot& place);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Lays out one file `__r_0.distcp` for each rank of the mesh. It holds the boxes that the rank owns, except those that
// a lower rank owns too. Objects go to the file of rank 0.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

// A tensor as a part of a stored one: one index along each of the first dimensions, and all of the others.
struct Slice {
  std::string stored;
  Dims at;      // along the first dimensions
  Dims counts;  // the stored tensor's extents along these dimensions
};

// How a framework that builds on DCP stores the tensors of a request.
struct DcpStorage {
  std::string directory;                                   // of the DCP: "iter_0000010/"
  std::vector<std::vector<Slice>> slices;                  // for each tensor, at least one place at which to store it
  std::vector<std::pair<std::string, std::string>> texts;  // further files: name and content
};
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request, DcpStorage storing);

}  // namespace dcp
}  // namespace reshard
