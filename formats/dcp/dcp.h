// PyTorch Distributed Checkpoint: a directory of `.metadata` and `__R_K.distcp` files, as
// torch.distributed.checkpoint.save leaves it (FSDP2, HSDP, tensor and pipeline parallel; torchtitan).
//
//   .metadata            which box of which tensor is which item of which file    (metadata.h)
//   __<rank>_<k>.distcp  items one after the other, each a torch.save archive of one tensor chunk or one object
//                        (formats/encoding/torch_archive.h), possibly inside a zstd frame; or, with
//                        SerializationFormat.SAFETENSORS, one safetensors blob a file
//
// Nothing says which mesh or placements were used. Described in docs/formats/dcp.md.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kDcpFormat;

namespace dcp {

inline constexpr std::string_view kMetadataFile = ".metadata";
inline constexpr std::string_view kDataEnding = ".distcp";
inline constexpr std::string_view kUnfinishedMetadata = ".metadata.tmp";  // of a save that died at its last rename
bool is_rank_metadata(std::string_view name);  // "__3.metadata": of a rank that saved on its own (torch >= 2.9,
                                               // use_collectives=False)
// Whether the path is .metadata, or a data file beside it: the user means their directory.
Result<bool> is_file_of_directory(const PathSnapshot& place);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// One file `__r_0.distcp` for each rank of the mesh, holding the boxes that rank owns and no lower one holds as well;
// objects in rank 0's.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

// A tensor as part of a stored one: one index along each of its first dimensions, all of the others.
struct Slice {
  std::string stored;
  Dims at;      // along the first dimensions
  Dims counts;  // of the stored tensor, along them
};

// How a framework that builds on DCP keeps the tensors of a request.
struct Storing {
  std::string directory;                                   // of the DCP: "iter_0000010/"
  std::vector<std::vector<Slice>> slices;                  // of each tensor: where it is stored, once at least
  std::vector<std::pair<std::string, std::string>> texts;  // further files, and what they hold
};
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request, Storing storing);

}  // namespace dcp
}  // namespace reshard
