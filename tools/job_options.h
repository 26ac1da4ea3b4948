// SPDX-License-Identifier: Apache-2.0
// Options that several subcommands share, and their conversion into the library's.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/registry.h"
#include "lib/audit/comparison.h"
#include "lib/base/json.h"
#include "lib/convert/conversion.h"
#include "lib/layout/descriptor.h"
#include "tools/command_line.h"

namespace reshard::tools {

// What moves tensor data between the ranks of a job.
enum class TransportChoice { kAuto, kMpi, kNccl };

// --memory, --threads, --quiet, --device, --gpu-memory, --transport
struct ResourceOptions {
  std::string memory = "256MiB";
  std::string device = "cpu", gpu_memory = "0";
  TransportChoice transport = TransportChoice::kAuto;
  int threads = 0;
  bool quiet = false;

  void add(CommandLine& line);
  Result<RunOptions> run_options() const;
};

// --family, --family-file, --config, and --source-names if there are tensors
struct ModelOptions {
  std::string family = "auto";
  std::string family_file;
  std::string source_names;
  std::string config;

  void add(CommandLine& line);
  void add_without_names(CommandLine& line);
  Result<ModelChoice> choice() const;
};

// --source-layout and --source-mesh: how per-rank files join (formats/ranks/ranks.h); other formats ignore them.
// --strip-prefix, --rename, --part, --weights: which tensors are used, and under which names.
struct SourceOptions {
  std::string layout, mesh, strip_prefix, part, weights = "model";
  std::vector<std::string> renames;

  void add(CommandLine& line);
  Result<KeyChanges> keys() const;
  Result<Weights> which_weights() const;
  // Loads --source-layout; nothing if it is not given. --source-mesh alone is a usage error.
  Result<std::optional<LayoutDescriptor>> load() const;
  // Opens a checkpoint as the options say. Unless `files_too`, its data may be missing (OpenOptions).
  Result<OpenCheckpoint> open(const std::string& path, bool files_too = false, bool skip_damaged = false) const;
};

// Values of --allow and --repair.
enum class Problem { kCover, kConfig, kExternal, kObjects };
enum class Repair { kVocabulary, kExperts };
const std::vector<Choice<Problem>>& problem_choices();

// The options of convert and plan.
struct ConvertOptions {
  std::string source, destination, to, names, mesh, layout, dtype = "keep", max_shard_size, donor, adapter, lora_alpha;
  std::string codec = "none";
  std::string format_option = "--to";  // the option that sets `to`
  std::string state;                   // directory of the journal; empty: next to the output
  std::optional<Container> shard_format;
  Quantization quantize = Quantization::kNone;
  std::optional<PaddingFill> vocab_padding;
  std::optional<Strategy> strategy;  // nothing: whichever is estimated to be faster
  Resume resume = Resume::kAuto;
  Index ranks = 1, ranks_per_machine = 8;  // of `plan`
  Index vocab_divisible_by = 0;
  std::vector<std::string> keep_dtype, include, exclude;
  std::set<Problem> allow;
  std::set<Repair> repair;
  bool keep_unknown = false, merge_adapter = false, force = false, dry_run = false, as_json = false, shuffle = true;
  SourceOptions source_layout;
  ModelOptions model;
  ResourceOptions resources;
  std::optional<MergeOptions> merge;  // of merge: `source` is the first one

  void add(CommandLine& line, bool destination_required);
  // `views`: offers formats that refer to the source's files, too.
  void add_format(CommandLine& line, const std::string& option = "--to", const std::string& title = "Format to write",
                  bool views = true);
  void add_changes(CommandLine& line);  // all options except source, destination and format
  Result<ConversionOptions> conversion_options() const;

 private:
  Status read_names(ConversionOptions& o) const;
  Status read_placement(const Format& format, RankPlacement& placement, bool has_family) const;
  Status read_files(const Format& format, ConversionOptions& o) const;
  Status read_typing(DtypeOptions& typing) const;
  Status read_adapter(AdapterOptions& out) const;
};

// Parses --codec: "none", "zstd:3".
Result<Compression> parse_codec(const std::string& codec, bool shuffle);

// Runs a conversion, from the checks to the final report, and returns the exit code (convert.cc).
Result<int> convert(const ConvertOptions& options);

// The names of the built-in layouts.
std::vector<std::string> layout_names();

// Returns $TMPDIR, or /tmp.
std::string temporary_directory();

}  // namespace reshard::tools
