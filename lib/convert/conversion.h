// One conversion, from an open checkpoint to a target format: decided completely first, then run.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/convert/fit.h"
#include "lib/engine/run.h"
#include "lib/layout/descriptor.h"
#include "lib/model/model.h"
#include "lib/model/placement.h"
#include "lib/model/view.h"
#include "lib/plan/cost.h"
#include "lib/plan/plan.h"

namespace reshard {

// Faults of the source that the user lets through.
struct Allowed {
  bool cover = false;   // tensors that are not stored exactly once, or whose files are damaged, are left out
  bool config = false;  // tensors that are not as the config says are written as they are
};

struct ConversionOptions {
  std::string source_path;  // as the user gave it, for the manifest
  ModelChoice model;
  std::optional<Convention> convention;  // the output's; nothing: the source's own
  bool keep_names = false;               // keep the source's names whatever the format's habit is
  std::string config_path;               // config.json, empty: none
  bool config_given = false;             // by the user, and not found beside the source: copied even through a link
  Mesh mesh;
  std::optional<LayoutDescriptor> layout;  // how the output lies on `mesh`, which is its; nothing: as Placer has it
  std::optional<DType> dtype;              // floating-point model tensors become this
  std::vector<std::string> keep_dtype, include, exclude;  // globs over the source's names
  Repairs repairs;
  Reader* donor = nullptr;  // of rows that the source lost; null: none
  // What rows that pad a vocabulary become; nothing: as the layout says. The vocabulary is padded where the layout says
  // so, or to a multiple of `vocab_divisible_by` x tp; 0: not.
  std::optional<VocabularyFill> vocab_padding;
  Index vocab_divisible_by = 0;
  Container container = Container::kSafetensors;
  Index max_file_bytes = 5'000'000'000;
  Compression compression;    // for formats that can
  std::optional<Index> rank;  // whose part is laid out, where ranks load it; nothing: all ranks'
  bool keep_unknown = false;
  Allowed allow;
  bool metadata_only = false;  // plan without looking into the data files
  std::string spool = ".";     // where compressed items may be decoded to
  RunOptions run;
};

// State of the source that the output does not get.
struct LeftOut {
  std::string what;  // "optimizer", "tied head"
  Index tensors = 0;
  Index objects = 0;
  Index bytes = 0;
  std::vector<std::string> names = {};  // where the user should know each
};

class Conversion {
 public:
  // Locates the tensors that take part, lays the target out and makes the plan. Refers to `source` and `format`.
  static Result<std::unique_ptr<Conversion>> prepare(Reader& source, const Format& format, ConversionOptions options);

  const ConversionOptions& options() const { return options_; }
  const Model& model() const { return model_; }  // the source's; a config without a family is not in it
  std::optional<Convention> target_convention() const { return target_convention_; }
  const Target& target() const { return *target_; }
  const Plan& plan() const { return plan_; }
  const Catalog& source_view() const { return source_view_; }  // the two that the plan goes between
  const Catalog& target_view() const { return target_view_; }
  const std::vector<LeftOut>& left_out() const { return left_out_; }
  const std::vector<std::string>& warnings() const { return warnings_; }  // of the target; the source has its own
  Index converted_tensors() const { return converted_; }                  // that change their dtype
  Index disk_needed() const;                                              // bytes, of all files
  Result<MemoryPlan> memory() const;

  // Bytes of each rank's part of the output, on the mesh that it is laid out for.
  std::vector<Index> bytes_of_ranks() const;
  void set_strategy(Strategy strategy) { options_.run.strategy = strategy; }

  void set_progress(std::function<void(Index bytes)> progress) { options_.run.progress = std::move(progress); }

  // For formats that show tensors where they lie: makes the file. Nothing is planned then, and nothing copied.
  Result<ViewReport> write_view(const std::string& destination, bool replace = false) const;

  // That tensors of which the output has one for both are equal. Reads them. Returns how many recorded checksums of
  // those that are left out hold.
  Result<Index> check_equal_tensors();

  // Writes the checkpoint. What it reads is added to the destination's inputs.
  struct Outcome {
    bool removed_leftover = false;
    Index checksums = 0;  // of the source that were recorded and hold
    std::vector<std::string> files_copied;
  };
  Result<Outcome> run(OutputPath destination);

 private:
  Conversion(Reader& source, const Format& format, ConversionOptions options)
      : source_(source), format_(format), options_(std::move(options)) {}

  Status select();
  Status choose_names();
  Status leave_out_faulty();
  Status make_views();
  Status fit();
  Status check_config();
  Result<DType> target_dtype(const Tensor& tensor, const std::string& native) const;
  Status lay_out();
  Status name_view();
  Result<LayoutRequest> layout_request();
  Result<Index> padded_to_multiple(Index rows) const;
  Status pad_vocabulary();
  Index head_copies() const;
  Status repeat_heads();
  Result<std::vector<TargetTensor>> target_tensors();
  Result<std::vector<TargetBlob>> target_blobs();
  // Gives each tensor of the target its placement.
  Status place(std::vector<TargetTensor>& tensors);
  std::string target_name(const std::string& canonical) const;
  std::string manifest(const std::vector<TensorProof>& proofs) const;
  std::vector<std::string> tokenizer_paths(std::vector<std::string>* warnings) const;
  Result<std::vector<std::string>> add_side_files(Output& output) const;
  bool renames() const { return model_.family && target_convention_.has_value(); }

  static constexpr Index kMaxSideFile = Index{256} << 20;  // bytes of config.json and the like

  Reader& source_;
  const Format& format_;
  ConversionOptions options_;
  Model model_;
  std::string config_text_;  // config.json, from beside the source or from within it
  bool copies_config_ = true;
  std::optional<Convention> target_convention_;
  bool hf_rows_ = false;
  std::vector<bool> is_faulty_;       // of the source's tensors: those that `allow.cover` leaves out
  bool complete_ = true;              // no filter took tensors out
  Catalog selected_;                  // the source's tensors that take part, as they are named there
  Catalog source_view_;               // the same as the plan sees them
  std::vector<TargetTensor> placed_;  // the output's
  std::unique_ptr<Target> target_;
  Catalog target_view_;
  Plan plan_;
  std::vector<LeftOut> left_out_;
  std::vector<std::string> warnings_;
  Index converted_ = 0;
  // Tensors of the source's view of which the output has one for both, so that they must be equal: a head tied to the
  // embedding, the step of parameters that become one.
  struct EqualTensors {
    std::size_t kept = 0, left_out = 0;
    std::string otherwise;  // what it means when they are not, a sentence
  };
  std::vector<EqualTensors> equal_tensors_;
  std::unordered_map<std::string, std::string> natives_;  // the source's own names, by canonical ones
  Json repairs_ = Json::array();
};

}  // namespace reshard
