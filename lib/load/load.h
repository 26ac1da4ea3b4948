// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint into memory: every rank of an engine gets its part of each tensor, for any mesh and layout,
// directly from the files of a checkpoint of any format. No converted copy is made.
//
//   auto load = TRY(Load::prepare(*reader, options));        // metadata only: what this rank will hold
//   for (const LoadTensor& t : load->tensors()) ...          // the caller allocates t.bytes() bytes each
//   const LoadReport report = TRY(load->run(destinations));  // reads, converts, places, checks
//
// A load is a conversion (conversion.h) whose target is the memory of ranks, so names, row orders, dtypes, padded
// vocabularies and repeated heads are handled in the same way. formats/load.h also opens the checkpoint.
//
// Ranks load independently, each reading the boxes that it needs (kDirect), or together (kExchange): then each element
// is read once in the whole job, by one rank, and sent to all that hold it. The former suits meshes without replicas
// and file systems that serve many readers; the latter suits replicas and slow storage.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/convert/draft.h"
#include "lib/device/digest.h"
#include "lib/engine/run.h"
#include "lib/load/load_destinations.h"

namespace reshard {

struct LoadOptions : Request {
  // `memory` limits only buffers, not the destinations or the checkpoint's metadata; `ranks` must be as many as the
  // mesh has; `device` is the one whose memory the destinations are in; `progress` counts what this rank has read.
  RunOptions run;
  Index rank = 0;  // this rank in the mesh; ignored if `run.ranks` is set
  // Whether to read items of which only a part is needed completely, in order to verify their recorded checksums. With
  // `run.ranks` nearly all items are read completely by the ranks together and verified anyway.
  bool check_whole_items = false;
};

// One tensor, as this rank will hold it.
struct LoadTensor {
  std::string name;  // as the engine calls it
  DType dtype = DType::kFloat32;
  Dims shape;         // of this rank's part; extents may be 0
  Dims global_shape;  // of the whole tensor, with padding and repeated heads
  // The boxes of the whole, in the engine's row order, and their origins in the part, which they tile.
  std::vector<LocalBox> boxes;

  Index bytes() const { return volume(shape) * byte_size(dtype); }
};

// The proof for one tensor of the plan. Name and digest are those of reshard_manifest.json and of a conversion: if
// names are translated, those of the canonical tensor in the canonical row order.
struct LoadProof {
  std::string name;
  DType dtype = DType::kFloat32;
  Digest part;                  // of the elements placed in this rank's memory
  std::optional<Digest> whole;  // of the whole tensor, if ranks load together
};

struct LoadReport {
  std::vector<LoadProof> proofs;
  Index bytes_read = 0;      // tensor data read by this rank
  Index bytes_received = 0;  // from other ranks
  Index checksums = 0;       // recorded checksums verified; with ranks, the sum on rank 0
};

struct LoadDigests;

class Load {
 public:
  // Reads metadata and the headers around the payloads. `source` and what the options point to must outlive the result.
  // With `ranks`, all of them must call prepare() and run() with the same options, and a rank that gets an error must
  // end its work (job.h).
  static Result<std::unique_ptr<Load>> prepare(Reader& source, LoadOptions options);
  ~Load();

  // Returns this rank's tensors in the order of the plan. Tensors of other pipeline stages are left out; empty parts
  // are not.
  const std::vector<LoadTensor>& tensors() const { return tensors_; }
  Index bytes() const;  // of all parts
  const LoadOptions& options() const { return options_; }
  const ConversionNotes& notes() const { return draft_.notes; }

  // Fills the destinations, one for each of tensors(). Fails if a recorded checksum does not match or, with `ranks`, if
  // the parts in the ranks' memories do not add up to what was read, or replicas differ. Errors name file, offset and
  // tensor. After an error the contents of the destinations are undefined.
  Result<LoadReport> run(std::span<const Destination> destinations);

 private:
  Load(Reader& source, LoadOptions options);
  Index rank() const { return options_.rank; }
  bool is_direct() const { return options_.run.strategy == Strategy::kDirect; }
  Status check_options();
  Status check_ranks_agree() const;
  Status add_up(const LoadDigests& digests, LoadReport& report) const;

  Reader& source_;
  LoadOptions options_;
  Draft draft_;
  std::unique_ptr<MemoryTarget> target_;
  Catalog target_view_;
  Plan plan_;
  RunOptions run_;  // for the tensors that are read before the load itself
  std::vector<HeldTensor> held_;
  std::vector<LoadTensor> tensors_;  // for each of held_
};

}  // namespace reshard
