// SPDX-License-Identifier: Apache-2.0
#include "tools/job_options.h"

#include <algorithm>
#include <charconv>

#include "formats/open.h"
#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/storage/http.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/model/family_file.h"
#include "lib/transport/nccl.h"
#include "tools/commands.h"
#include "tools/job.h"

namespace reshard::tools {

void ResourceOptions::add(CommandLine& line) {
  line.group("Run");
  line.add_option("--memory", memory, "Memory that the whole process may use")
      .takes("SIZE")
      .common()
      .or_environment("RESHARD_MEMORY")
      .of_a_rank()
      .shows_default();
  line.add_option("--threads", threads, "Worker threads (default: two per core)").of_a_rank().within(1, 1024);
  line.add_option("--device", device, "Device that converts, packs and digests: cpu, cuda, cuda:N, auto")
      .takes("DEVICE")
      .completes({"cpu", "cuda", "auto"})
      .of_a_rank()
      .shows_default();
  line.add_option("--gpu-memory", gpu_memory, "GPU memory to use; 0: as much as needed")
      .takes("SIZE")
      .of_a_rank()
      .shows_default();
  line.add_choice("--transport", transport,
                  {{"auto", TransportChoice::kAuto}, {"mpi", TransportChoice::kMpi}, {"nccl", TransportChoice::kNccl}},
                  "Transport of tensor data between ranks: auto, mpi or nccl")
      .takes("NAME")
      .shows_default();
  line.add_flag("--quiet,-q", quiet, "Print errors and findings only").common().of_a_rank();
}

Result<RunOptions> ResourceOptions::run_options() const {
  RunOptions run;
  run.memory = TRY(parse_bytes(memory).context("--memory"));
  if (host())
    run.memory = checked_add(run.memory, host()->resident).value_or(run.memory);
  else
    limit_memory(run.memory);
  run.threads = threads;
  run.interrupt = &interrupted();
  if (!host()) add_http_interrupt(run.interrupt);
  run.ranks = job_ranks();
  const Index cap = TRY(parse_bytes(gpu_memory).context("--gpu-memory"));
  if (device == "cpu") {
    if (cap > 0) return usage_error("--gpu-memory needs --device cuda");
    if (transport == TransportChoice::kNccl)
      return usage_error("--transport nccl moves GPU memory; it needs --device cuda");
    return run;
  }
  run.device = host() ? TRY(host()->device(device, cap)) : TRY(job_device(device, cap));
  if (!run.ranks || transport == TransportChoice::kMpi) return run;
  if (transport == TransportChoice::kNccl)
    if (const std::string why = TRY(why_no_nccl(*run.ranks, run.device->ordinal())); !why.empty())
      return usage_error("--transport nccl: " + why);
  run.data = [gpu = run.device]() -> Result<Transport*> {
    Transport* const ranks = TRY(job_nccl(*gpu));
    return ranks ? ranks : job_ranks();
  };
  return run;
}

std::vector<std::string> layout_names() {
  std::vector<std::string> out;
  for (const BuiltinLayout& layout : builtin_layouts()) out.emplace_back(layout.name);
  return out;
}

namespace {

std::vector<std::string> with_others(std::vector<std::string> others, const std::vector<std::string>& names) {
  others.insert(others.end(), names.begin(), names.end());
  return others;
}

}  // namespace

void ModelOptions::add(CommandLine& line) {
  add_without_names(line);
  line.add_option("--source-names", source_names,
                  "Convention of the source's names, if several fit (default: detected)")
      .takes("CONVENTION")
      .completes(convention_options());
}

void ModelOptions::add_without_names(CommandLine& line) {
  line.group("Model");
  line.add_option("--family", family, "Model family: auto, none or a name (see: reshard families)")
      .takes("NAME")
      .completes(with_others({"auto", "none"}, family_names()))
      .shows_default();
  line.add_option("--family-file", family_file, "Read a model family of your own from a JSON file").read();
  line.add_option("--config", config, "Model's config.json (default: in the source or the directory above)")
      .common()
      .read();
}

Result<ModelChoice> ModelOptions::choice() const {
  ModelChoice out;
  if (!source_names.empty()) {
    out.convention = find_convention(source_names);
    if (!out.convention) return unknown_word("naming convention", source_names, convention_options());
  }
  if (!family_file.empty()) {
    if (family != "auto") return usage_error("--family and --family-file exclude each other; give one of them");
    out.family = TRY(load_family(family_file));
    out.families = Families(out.family);
    if (!out.family->class_table.empty()) {  // a table of classes has no names for conversions
      out.family = nullptr;
      return out;
    }
  } else if (family == "auto") {
    return out;
  } else if (family != "none") {
    out.family = find_family(family);
    if (!out.family) return unknown_word("family", family, with_others({"auto", "none"}, family_names()));
  } else if (out.convention) {
    return usage_error("--source-names needs a model family, and --family none keeps names as they are stored");
  }
  out.detect = false;
  return out;
}

void SourceOptions::add(CommandLine& line) {
  line.group("Source");
  line.add_option("--source-layout", layout, "How per-rank files join: a layout file or a built-in layout")
      .completes(layout_names())
      .read();
  line.add_option("--source-mesh", mesh, "Mesh of the per-rank files if the layout names none: tp=4").takes("MESH");
  line.add_option("--strip-prefix", strip_prefix, "Prefix to strip from tensor names (default: detected)")
      .takes("PREFIX");
  line.add_option("--part", part, "Use one part of a training state: model, optimizer, ema, ...")
      .takes("NAME")
      .completes({"model", "optimizer", "ema"});
  line.add_option("--rename", renames, "Replace whole components of names: transformer.h=model.layers")
      .takes("FROM=TO");
  line.add_option("--weights", weights, "Copy of the weights to use, if the state has two")
      .takes("NAME")
      .suggests({"model", "master"})
      .means({"The copy that the model computes with", "The optimizer's float32 copy"})
      .shows_default();
}

Result<Weights> SourceOptions::which_weights() const {
  if (weights == "model") return Weights::kModel;
  if (weights == "master") return Weights::kMaster;
  return unknown_word("--weights", weights, {"model", "master"});
}

namespace {

// Returns whether `name` consists of non-empty components: "model.layers", not "", ".model" or "model.".
bool is_components(const std::string& name) {
  const std::vector<std::string> components = split(name, '.');
  return std::none_of(components.begin(), components.end(), [](const std::string& c) { return c.empty(); });
}

Result<std::pair<std::string, std::string>> parse_rename(const std::string& rename) {
  const std::size_t equals = rename.find('=');
  const std::string from = rename.substr(0, equals), to = equals == rename.npos ? "" : rename.substr(equals + 1);
  if (!is_components(from) || !is_components(to))
    return usage_error("--rename '" + printable(rename) + "': expected FROM=TO, whole components of names such as " +
                       "'transformer.h=model.layers'; --strip-prefix removes components from the front");
  return std::pair(from, to);
}

}  // namespace

Result<KeyChanges> SourceOptions::keys() const {
  KeyChanges out{strip_prefix, part, {}};
  for (const std::string& rename : renames) out.renames.push_back(TRY(parse_rename(rename)));
  return out;
}

Result<std::optional<LayoutDescriptor>> SourceOptions::load() const {
  if (layout.empty() && !mesh.empty()) return usage_error("--source-mesh needs --source-layout");
  if (layout.empty()) return std::optional<LayoutDescriptor>();
  return std::optional(TRY(load_layout(layout, mesh)));
}

Result<OpenCheckpoint> SourceOptions::open(const std::string& path, bool files_too, bool skip_damaged) const {
  const auto descriptor = TRY(load());
  OpenOptions how;
  how.files_too = files_too;
  how.skip_damaged = skip_damaged;
  how.keys = TRY(keys());
  how.layout = descriptor ? &*descriptor : nullptr;
  how.weights = TRY(which_weights());
  return open_checkpoint(path, how);
}

namespace {

// "PyTorch DCP", ...
std::vector<std::string> titles_of(const std::vector<const Format*>& formats) {
  std::vector<std::string> titles;
  for (const Format* f : formats) titles.emplace_back(f->title);
  return titles;
}

std::vector<std::string> names_of(const std::vector<const Format*>& formats) {
  std::vector<std::string> names;
  for (const Format* f : formats) names.emplace_back(f->name);
  return names;
}

// Returns the names of the formats that satisfy `is`: "dcp, ranks".
std::string formats_where(bool (*is)(const Format&)) {
  std::vector<const Format*> out = written_formats();
  std::erase_if(out, [&](const Format* f) { return !is(*f); });
  return join(names_of(out), ", ");
}
bool takes_mesh(const Format& f) { return f.takes_mesh(); }
bool takes_container(const Format& f) { return f.takes_container; }
bool takes_compression(const Format& f) { return f.takes_compression; }
bool is_cut_by_size(const Format& f) { return f.max_file_bytes > 0; }
bool is_file(const Format& f) { return f.is_file; }

// Fails if an option is given that does not apply to the target format ("--to dcp").
Status check_is_for(std::string_view option, bool given, bool (*is)(const Format&), const Format& format,
                    const std::string& target) {
  if (!given || is(format)) return {};
  return usage_error(std::string(option) + " does not apply to " + target + "; it applies to " + formats_where(is));
}

}  // namespace

void ConvertOptions::add(CommandLine& line, bool destination_required) {
  line.add_option("SRC", source, "Checkpoint to read: a directory or a file").read().required();
  line.add_option("DST", destination, "Directory to create (with --to " + formats_where(is_file) + ": a file)")
      .written(Option::Outputs::kBucketsToo)
      .required(destination_required);
  add_format(line);
  add_changes(line);
}

void ConvertOptions::add_format(CommandLine& line, const std::string& option, const std::string& title, bool views) {
  format_option = option;
  std::vector<const Format*> targets = written_formats();
  if (!views) std::erase_if(targets, [](const Format* f) { return !f->lay_out; });
  line.group("Target");
  line.add_option(option, to, title)
      .takes("FORMAT")
      .common()
      .suggests(names_of(targets))
      .means(titles_of(targets))
      .required();
}

namespace {

const std::vector<std::string>& target_dtypes() {
  static const std::vector<std::string> names = {"keep",    "float32",       "bfloat16",
                                                 "float16", "float8_e4m3fn", "float8_e5m2"};
  return names;
}

}  // namespace

const std::vector<Choice<Problem>>& problem_choices() {
  static const std::vector<Choice<Problem>> choices = {
      {"cover", Problem::kCover, "Leave out tensors that are incomplete or stored twice"},
      {"config", Problem::kConfig, "Write tensors that contradict config.json"},
      {"external", Problem::kExternal, "Read data that an HDF5 file stores in other files"},
      {"objects", Problem::kObjects, "Copy objects whose pickles may run code when they are loaded"}};
  return choices;
}

void ConvertOptions::add_changes(CommandLine& line) {
  line.group("Target");
  line.add_option("--mesh", mesh, "Target mesh, e.g. tp=4,dp_shard=2,pp=2 (default: one rank)").takes("MESH").common();
  line.add_option("--layout", layout, "Target layout: a file (see: reshard layout) or a built-in layout")
      .completes(layout_names())
      .read();
  line.add_option("--names", names, "Naming convention (default: what the format expects)")
      .takes("CONVENTION")
      .common()
      .suggests(with_others({"keep"}, convention_options()));
  line.add_option("--max-shard-size", max_shard_size, "Largest file to write (default: 5GB, or the format's own limit)")
      .takes("SIZE")
      .common();
  line.add_choice("--shard-format", shard_format,
                  {{"safetensors", Container::kSafetensors}, {"bin", Container::kTorchSave}},
                  "Container of " + format_option + " " + formats_where(takes_container))
      .takes("NAME");
  line.add_option(
          "--codec", codec,
          "Compression of " + format_option + " " + formats_where(takes_compression) + ": none or zstd:1 to zstd:19")
      .takes("CODEC")
      .completes({"none", "zstd:3", "zstd:9", "zstd:19"})
      .shows_default();
  line.add_flag("--shuffle,!--no-shuffle", shuffle, "Group the bytes of elements before compressing (default: yes)");
  line.group("Rows and types");
  line.add_option("--dtype", dtype, "Convert floating-point model tensors to this dtype")
      .takes("DTYPE")
      .common()
      .suggests(target_dtypes())
      .shows_default();
  line.add_option("--keep-dtype", keep_dtype, "Leave the dtype of these tensors as it is").names_tensors();
  line.add_choice(
          "--quantize", quantize,
          {{"fp8-block", Quantization::kFp8Block, "float8 with a scale per 128 x 128 block, as DeepSeek stores it"},
           {"fp8-tensor", Quantization::kFp8Tensor, "float8 with a scale per matrix"},
           {"mxfp4", Quantization::kMxfp4, "4-bit floats with a scale per 32 elements, as gpt-oss stores experts"}},
          "Quantize matrices")
      .takes("SCHEME");
  line.add_option("--include", include, "Convert only tensors and objects with these names").common().names_tensors();
  line.add_option("--exclude", exclude, "Leave out tensors and objects with these names").common().names_tensors();
  line.add_choices<Repair>(
          "--repair", repair,
          {{"vocab", Repair::kVocabulary, "Cut rows beyond the vocabulary; take missing rows from --donor"},
           {"experts", Repair::kExperts, "Split matrices that hold the rows of several experts"}},
          "Fix these faults of the source in the output")
      .takes("WHAT");
  line.add_option("--donor", donor, "Checkpoint to take missing rows from, with --repair vocab").read().takes("PATH");
  line.add_option("--vocab-divisible-by", vocab_divisible_by, "Pad the vocabulary to a multiple of N x tp")
      .within(Index{1}, Index{1} << 20);
  line.add_choice(
          "--vocab-padding", vocab_padding,
          {{"zero", PaddingFill::kZero}, {"repeat-last", PaddingFill::kRepeatLast}, {"mean", PaddingFill::kMean}},
          "Content of added rows")
      .takes("CONTENT");
  line.group("Model");
  line.add_flag("--merge-adapter", merge_adapter, "Merge a LoRA adapter into the weights");
  line.add_option("--adapter", adapter, "Adapter of --merge-adapter (default: in SRC)").read().takes("DIR");
  line.add_option("--lora-alpha", lora_alpha, "Adapter's alpha if it has no adapter_config.json").takes("X");
  line.add_flag("--keep-unknown", keep_unknown, "Copy tensors that the model family does not know");
  line.group("Source");
  line.add_choices("--allow", allow, problem_choices(), "Ignore these problems in the source").takes("PROBLEM");
  source_layout.add(line);
  model.add(line);
  line.group("Run");
  line.add_choice("--strategy", strategy,
                  {{"auto", std::nullopt, "Whichever is estimated to be faster"},
                   {"direct", Strategy::kDirect, "Each rank reads what it writes"},
                   {"exchange", Strategy::kExchange, "Each byte is read once and sent to the rank that writes it"}},
                  "How several ranks (mpirun) share the work")
      .takes("NAME")
      .shows_default();
  resources.add(line);
}

Result<Compression> parse_codec(const std::string& codec, bool shuffle) {
  constexpr std::string_view kZstd = "zstd:";
  constexpr int kHighest = 19;  // levels above it take hundreds of megabytes a thread
  Compression out{0, shuffle};
  if (codec == "none") return out;
  const std::string_view digits = codec.starts_with(kZstd) ? std::string_view(codec).substr(kZstd.size()) : "";
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), out.zstd_level);
  if (parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size() || out.zstd_level < 1 ||
      out.zstd_level > kHighest)
    return usage_error("--codec: expected none or zstd:LEVEL with a level of 1 to " + std::to_string(kHighest) +
                       ", got '" + printable(codec) + "'");
  return out;
}

Status ConvertOptions::read_names(ConversionOptions& o) const {
  if (names.empty()) return {};
  o.naming.keep_names = names == "keep";
  o.naming.convention = find_convention(names);
  if (o.naming.convention || o.naming.keep_names) return {};
  return unknown_word("naming convention", names, with_others(convention_options(), {"keep"}));
}

Status ConvertOptions::read_placement(const Format& format, RankPlacement& placement, bool has_family) const {
  if (!format.takes_mesh() && !(mesh.empty() && layout.empty()))
    return usage_error(std::string(mesh.empty() ? "--layout" : "--mesh") + " does not apply to " + format_option + " " +
                       to + ", whose files are not sharded by rank; it applies to " + formats_where(takes_mesh));
  if (format.sharding == Sharding::kOwnLocal && !has_family && !mesh.empty())
    return usage_error(format_option + " " + to +
                       " shards tensors between attention heads, so it needs a model family; got --family none");
  if (layout.empty()) {
    if (!mesh.empty()) placement.mesh = TRY(Mesh::parse(mesh));
    return {};
  }
  placement.layout = TRY(load_layout(layout, mesh));
  if (!placement.layout->mesh)
    return usage_error("layout '" + printable(placement.layout->name) + "' has no mesh; add --mesh");
  placement.mesh = *placement.layout->mesh;
  return {};
}

Status ConvertOptions::read_files(const Format& format, ConversionOptions& o) const {
  const std::string target = format_option + " " + to;
  o.compression = TRY(parse_codec(codec, shuffle));
  if (!shuffle && o.compression.zstd_level == 0) return usage_error("--no-shuffle needs --codec");
  TRY(check_is_for("--codec", o.compression.zstd_level > 0, takes_compression, format, target));
  TRY(check_is_for("--shard-format", shard_format.has_value(), takes_container, format, target));
  TRY(check_is_for("--max-shard-size", !max_shard_size.empty(), is_cut_by_size, format, target));
  if (is_cut_by_size(format))
    o.max_file_bytes = max_shard_size.empty() ? format.max_file_bytes : TRY(parse_bytes(max_shard_size));
  if (o.max_file_bytes < 1) return usage_error("--max-shard-size: expected a positive size");
  o.container = shard_format.value_or(Container::kSafetensors);
  o.spool = destination.empty() ? "." : parent_path(destination);
  return {};
}

Status ConvertOptions::read_typing(DtypeOptions& typing) const {
  if (dtype != "keep") {
    typing.dtype = dtype_from_user(dtype);
    if (!typing.dtype || !can_convert(DType::kFloat32, *typing.dtype) || *typing.dtype == DType::kFloat64)
      return unknown_dtype(dtype, target_dtypes());
  }
  typing.keep_dtype = keep_dtype;
  typing.quantize = quantize;
  if (quantize != Quantization::kNone && merge)
    return usage_error("--quantize does not apply to merge; merge first, then convert the result with --quantize");
  return {};
}

Status ConvertOptions::read_adapter(AdapterOptions& out) const {
  if (!adapter.empty() && !merge_adapter) return usage_error("--adapter needs --merge-adapter");
  if (lora_alpha.empty()) return {};
  const auto json = parse_json(lora_alpha, "--lora-alpha");
  if (!json || !json->is_number())
    return usage_error("--lora-alpha: expected a number, got '" + printable(lora_alpha) + "'");
  out.alpha = TRY(json->as_double());
  return {};
}

Result<ConversionOptions> ConvertOptions::conversion_options() const {
  ConversionOptions o;
  o.source_path = source;
  o.model = TRY(model.choice());
  TRY(read_names(o));
  if (o.naming.convention && o.model.is_none())
    return usage_error("--names " + names + " needs a model family, and --family none keeps names as they are stored");
  const Format& format = *TRY(find_format(to));
  TRY(read_placement(format, o.placement, !o.model.is_none()));
  TRY(read_files(format, o));
  TRY(read_typing(o.typing));
  TRY(read_adapter(o.adapter));
  o.selection = {include, exclude, source_layout.part, keep_unknown, merge_adapter};
  o.config_path = model.config;
  o.repairs = {repair.contains(Repair::kVocabulary), repair.contains(Repair::kExperts)};
  if (!donor.empty() && !o.repairs.vocabulary) return usage_error("--donor needs --repair vocab");
  o.allow = {allow.contains(Problem::kCover), allow.contains(Problem::kConfig)};
  o.vocabulary.vocab_divisible_by = vocab_divisible_by;
  o.vocabulary.vocab_padding = vocab_padding;
  o.run = TRY(resources.run_options());
  return o;
}

std::string temporary_directory() {
  const std::string directory = environment_variable("TMPDIR");
  return directory.empty() ? "/tmp" : directory;
}

}  // namespace reshard::tools
