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
bool is_file_of_directory(const std::string& path);

Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options);

// One file `__r_0.distcp` for each rank of the mesh, holding the boxes that rank owns and no lower one holds as well;
// objects in rank 0's.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);

}  // namespace dcp
}  // namespace reshard
