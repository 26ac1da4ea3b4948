// Loading a checkpoint into memory: every rank of an engine gets its part of each tensor, for any mesh and any layout,
// straight from the files of a checkpoint of any format. No converted copy is made.
//
//   auto load = TRY(Load::prepare(*reader, options));        // metadata only: what this rank is to hold
//   for (const LoadTensor& t : load->tensors()) ...          // the caller allocates t.bytes() bytes each
//   const LoadReport report = TRY(load->run(destinations));  // reads, converts, places, checks
//
// It is a conversion (conversion.h) whose target is the memory of ranks: names, row orders, dtypes, padded vocabularies
// and repeated heads are dealt with as there. formats/load.h opens the checkpoint too.
//
// Ranks load on their own, each reading the boxes that it needs (kDirect), or together (kExchange): then every element
// is read once in the whole job, by one rank, and sent to all that hold it. The former suits a file system that serves
// many readers, and meshes without copies; the latter replicas, and slow storage.
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

// Of RunOptions, `memory` is of buffers alone, beside the destinations and the checkpoint's metadata; `ranks` are as
// many as the mesh has; `device` is whose memory the destinations are; `progress` counts what this rank has read.
struct LoadOptions : Wanted, RunOptions {
  Index rank = 0;  // of the mesh, this one; with `ranks` it is theirs that counts
  // Whether stored items of which a part only is needed are read to their end, to check their recorded checksums. With
  // `ranks` nearly all are seen whole by them together, and checked anyway.
  bool check_whole_items = false;
};

// One tensor as this rank is to hold it.
struct LoadTensor {
  std::string name;  // the engine's
  DType dtype = DType::kFloat32;
  Dims shape;         // of this rank's part; an extent may be 0
  Dims global_shape;  // of the whole, padding and repeated heads included
  // Which boxes of the whole, in the engine's order of rows, stand where in the part. They tile it.
  std::vector<LocalBox> boxes;

  Index bytes() const { return volume(shape) * byte_size(dtype); }
};

// What was loaded of one tensor of the plan. Its name and its digest are as reshard_manifest.json and the digests of a
// conversion have them: of tensors under common names, in the common order of rows, where names are changed.
struct LoadProof {
  std::string name;
  DType dtype = DType::kFloat32;
  Digest part;                  // of the elements placed in this rank's memory
  std::optional<Digest> whole;  // of the tensor, where ranks load together
};

struct LoadReport {
  std::vector<LoadProof> proofs;
  Index bytes_read = 0;      // of tensor data, by this rank
  Index bytes_received = 0;  // from other ranks
  Index checksums = 0;       // recorded ones that were computed anew and agree; with ranks, those of all on rank 0
};

struct LoadDigests;

class Load {
 public:
  // Reads metadata and the headers around the payloads. Refers to `source` and what the options point to. With `ranks`,
  // all of them call it and run() with the same options; one that gets an error must end its work (job.h).
  static Result<std::unique_ptr<Load>> prepare(Reader& source, LoadOptions options);
  ~Load();

  // In the order of the plan. Tensors that other pipeline stages hold are not among them; empty parts are.
  const std::vector<LoadTensor>& tensors() const { return tensors_; }
  Index bytes() const;  // of all parts together
  const LoadOptions& options() const { return options_; }
  const ConversionNotes& notes() const { return draft_.notes; }

  // Fills the destinations, one for each of tensors(). Checks what is recorded: a checksum that does not agree is an
  // error, and so is, with `ranks`, a tensor whose parts in the ranks' memories do not add up to what was read, or
  // replicas that differ. Errors name file, offset and tensor. After an error the destinations hold anything.
  Result<LoadReport> run(std::span<const Destination> destinations);

 private:
  Load(Reader& source, LoadOptions options);
  Index rank() const { return options_.rank; }
  bool is_direct() const { return options_.strategy == Strategy::kDirect; }
  Status check_options();
  Status check_ranks_agree() const;
  Status add_up(const LoadDigests& digests, LoadReport& report) const;

  Reader& source_;
  LoadOptions options_;
  Draft draft_;
  std::unique_ptr<MemoryTarget> target_;
  Catalog target_view_;
  Plan plan_;
  RunOptions run_;  // of what is read before the load itself
  std::vector<HeldTensor> held_;
  std::vector<LoadTensor> tensors_;  // of the same
};

}  // namespace reshard
