// SPDX-License-Identifier: Apache-2.0
// Checkpoints of Orbax, JAX's library (orbax/checkpoint/_src, orbax/checkpoint/experimental/v1), of all versions that
// store arrays by tensorstore.
//
//   STEP/                          of a CheckpointManager ("5", "step_5"), or of v1, next to a file "orbax.checkpoint"
//     _CHECKPOINT_METADATA         times, custom metadata
//     commit_success.txt           written last
//     items/ default/ state/ ...   an item: a tree of arrays; or the item is the directory itself
//       _METADATA _sharding array_metadatas/ _strings.json    (item_metadata.h)
//       manifest.ocdbt d/          a database (ocdbt.h) of arrays (zarr.h), merged from those of the processes
//       ocdbt.process_N/           the database of each process, which keeps its large chunks
//       params.w/.zarray ...       without a database: a directory for each array
//     meta/metadata                an item that is JSON
//
// Levanter and EasyDeL write the arrays with tensorstore alone: a database whose keys are paths, or nested directories.
// Either way model/layers/w is read as model.layers.w.
//
// A save is written under a name with ".orbax-checkpoint-tmp" and renamed; the databases of processes are merged last.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kOrbaxFormat;
extern const Format kOrbaxZarr2Format;  // written only, for versions of Orbax that do not read zarr 3

namespace orbax {

inline constexpr std::string_view kCheckpointMetadata = "_CHECKPOINT_METADATA";
inline constexpr std::string_view kUnfinished = ".orbax-checkpoint-tmp";
inline constexpr std::string_view kProcessPrefix = "ocdbt.process_";

// An item of arrays.
struct Item {
  std::string name;                     // of its directory; empty if it is the checkpoint itself
  const PathSnapshot* place = nullptr;  // valid as long as the checkpoint's snapshot
};

// The parts of a checkpoint.
struct Parts {
  const PathSnapshot* directory = nullptr;
  std::vector<Item> items;
  std::vector<std::string> json;    // directories of items that are JSON
  std::vector<std::string> others;  // directories that are not read
};

// Finds the items of a checkpoint. Returns no items if it is not one of Orbax's.
Result<Parts> find_parts_of(const PathSnapshot& place);

// Returns whether the files of a step of Levanter or EasyDeL (eformer) are in a directory.
bool has_step_files(const PathSnapshot& place);

// Opens a step, an item or one of an item's files. Fails (corrupt) if the save did not finish.
Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

// Lays out an item: arrays of zarr 3 in chunks, cut as the mesh cuts tensors, that are compressed if the request says
// so. Strings are leaves of the tree; other objects are in files of reshard's own, which JAX ignores. Fails
// with kUnsupported for a dtype that zarr has no name for.
Result<std::unique_ptr<Target>> lay_out(LayoutRequest request);
Result<std::unique_ptr<Target>> lay_out_zarr2(LayoutRequest request);

}  // namespace orbax
}  // namespace reshard
