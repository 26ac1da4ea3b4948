// SPDX-License-Identifier: Apache-2.0
// One conversion, from an open checkpoint to a target format. prepare() decides everything, run() copies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/convert/draft.h"
#include "lib/engine/run.h"
#include "lib/plan/cost.h"
#include "lib/plan/plan.h"

namespace reshard {

class ConversionSource;
class DeltaChain;
class SourceManifest;
class WatchedFiles;

class Conversion {
 public:
  // Makes the draft (draft.h), lays out the target's files and makes the plan. `source` and `format` must outlive it.
  static Result<std::unique_ptr<Conversion>> prepare(Reader& source, const Format& format, ConversionOptions options);

  const ConversionOptions& options() const { return options_; }
  const Format& format() const { return format_; }
  const Translation& names() const { return draft_.names; }
  const Target& target() const { return *target_; }
  const Plan& plan() const { return plan_; }
  // The plan copies from source_view() to target_view().
  const Catalog& source_view() const { return draft_.view.catalog; }
  const Catalog& target_view() const {
    return format_.write_view || draft_.names.renames() ? target_view_ : target_->catalog();
  }
  const std::optional<Identity>& identity() const { return draft_.identity; }
  bool computes() const { return draft_.computes(); }
  // Returns what the source's format knows about the model, for the manifest of the output (provenance.h).
  Json provenance() const;
  const Merge* merge() const { return draft_.merge ? &*draft_.merge : nullptr; }
  const std::vector<SideFile>& beside() const { return draft_.side_files; }
  const ConversionNotes& notes() const { return draft_.notes; }        // of the target; the source has its own warnings
  Index converted_tensors() const { return draft_.output.converted; }  // number of tensors that change their dtype
  Index disk_needed() const;                                           // bytes of all files
  Result<MemoryPlan> memory() const;

  std::vector<std::string> inputs() const;  // the files that it reads, and the sources of a merge

  // Returns the bytes of each rank's part of the output, on the target's mesh.
  std::vector<Index> bytes_of_ranks() const;

  void set_strategy(Strategy strategy) { options_.run.strategy = strategy; }

  // Returns whether an interrupted run() can be resumed. The journal of a local output records neither the inputs of
  // computed tensors nor the offsets of compressed data.
  bool can_resume(const std::string& destination) const;
  void set_resume(Resume resume, std::function<void(const std::string& note)> on_note) {
    options_.resume = resume;
    options_.on_note = std::move(on_note);
  }

  void set_progress(std::function<void(Index bytes)> progress) { options_.run.progress = std::move(progress); }

  // For formats that refer to tensors in place: writes the file. Nothing is planned or copied for them.
  Result<ViewReport> write_view(const std::string& destination, bool replace = false) const;

  // Writes the checkpoint, to a bucket if the destination is a URL (lib/output/upload.h). Adds the files that it reads
  // to the destination's inputs, which are never replaced.
  struct Outcome {
    Index checksums = 0;  // checksums recorded in the source that were verified
    Index digests = 0;    // digests of the source's manifest that were verified
  };
  Result<Outcome> run(OutputPath destination);

  // Computes the manifest of run() without writing the output. With `recorded`, also checks the source against its own
  // manifest.
  Result<std::string> manifest_text(const RunOptions& run, const SourceManifest* recorded = nullptr);

 private:
  friend class ConvertedImage;  // reads the output without writing it
  Conversion(Reader& source, const Format& format, ConversionOptions options)
      : source_(source), format_(format), options_(std::move(options)) {}

  Reader& adapter() const { return options_.adapter.reader ? *options_.adapter.reader : source_; }
  void note_alike();
  Index kept_bytes() const;
  Status check_same_plan(std::uint64_t plan_fingerprint) const;
  Status check_options(const std::string& destination) const;
  Result<Outcome> upload(OutputPath destination);
  Status check_merged(const ConversionSource& origin) const;
  // Reads the records of the deltas that a merge applies, and compares the start of the base with them. Returns null if
  // it applies none.
  Result<std::unique_ptr<DeltaChain>> open_deltas(const ConversionSource& origin) const;
  // What reshard recorded when it wrote the sources, to compare with what is read. Null: no record.
  struct Records {
    const SourceManifest* source = nullptr;
    const DeltaChain* deltas = nullptr;
  };
  Result<Outcome> write(Output& output, ConversionSource& origin, const Records& records, const WatchedFiles& read);
  Result<std::string> facts(std::uint64_t plan_fingerprint) const;
  Result<std::vector<SideFile>> side_files() const;

  Reader& source_;
  const Format& format_;
  ConversionOptions options_;
  Draft draft_;  // its output's tensors are the target's
  // Tensors of the output with the same shape and placement.
  struct Alike {
    Dims shape;
    SharedPlacement placement;
    Index element_bytes = 0;  // of all of them together
  };
  std::vector<Alike> alike_;
  std::unique_ptr<Target> target_;  // null for a format that refers to tensors in place; then there is no plan
  Catalog target_view_;             // empty if it is the target's catalog
  Plan plan_;
};

}  // namespace reshard
