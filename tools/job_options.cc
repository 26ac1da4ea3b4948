#include "tools/job_options.h"

#include <algorithm>
#include <charconv>

#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"
#include "lib/model/family_file.h"
#include "lib/transport/nccl.h"
#include "tools/commands.h"
#include "tools/job.h"

namespace reshard::tools {

void ResourceOptions::add(CommandLine& line) {
  line.add_option("--memory", memory, "Memory the whole process may take")
      .or_environment("RESHARD_MEMORY")
      .of_a_rank()
      .shows_default();
  line.add_option("--threads", threads, "Worker threads (default: two a core, as half of them wait for the disk)")
      .of_a_rank()
      .within(1, 1024);
  line.add_option(
          "--device", device,
          "Where elements are converted, packed and digested: cpu, cuda, cuda:N, or auto (a GPU where there is one)")
      .suggests({"cpu", "cuda", "auto"})
      .of_a_rank()
      .shows_default();
  line.add_option("--gpu-memory", gpu_memory, "GPU memory it may take (0: what it needs)").of_a_rank().shows_default();
  line.add_option("--transport", transport,
                  "How elements travel between ranks: mpi, nccl (each rank with a GPU of its own), or auto")
      .one_of({"auto", "mpi", "nccl"})
      .shows_default();
  line.add_flag("--quiet,-q", quiet, "Print errors only").of_a_rank();
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
  run.ranks = job_ranks();
  const Index cap = TRY(parse_bytes(gpu_memory).context("--gpu-memory"));
  if (device == "cpu") {
    if (transport == "nccl") return usage_error("--transport nccl moves GPU memory; it needs --device cuda");
    return run;
  }
  run.device = host() ? TRY(host()->device(device, cap)) : TRY(job_device(device, cap));
  if (!host()) limit_memory(checked_add(run.memory, run.device->host_bytes()).value_or(run.memory));
  if (!run.ranks || transport == "mpi") return run;
  if (transport == "nccl")
    if (const std::string why = TRY(why_no_nccl(*run.ranks, run.device->ordinal())); !why.empty())
      return usage_error("--transport nccl: " + why);
  run.data = [gpu = run.device]() -> Result<Transport*> {
    Transport* const ranks = TRY(job_nccl(*gpu));
    return ranks ? ranks : job_ranks();
  };
  return run;
}

namespace {

std::vector<std::string> with_others(std::vector<std::string> others, const std::vector<std::string>& names) {
  others.insert(others.end(), names.begin(), names.end());
  return others;
}

}  // namespace

void ModelOptions::add(CommandLine& line) {
  line.add_option("--family", family,
                  "Model family: auto, none (names stay as stored), or one of: " + join(family_names(), ", "))
      .suggests(with_others({"auto", "none"}, family_names()))
      .shows_default();
  line.add_option("--family-file", family_file, "A model family of your own, a JSON file (docs/adding.md)").read();
  line.add_option("--config", config, "The model's config.json (default: beside the checkpoint, or one level up)")
      .read();
}

Result<ModelChoice> ModelOptions::choice() const {
  if (!family_file.empty()) {
    if (family != "auto") return usage_error("--family and --family-file: give one of them");
    const Family* const own = TRY(load_family(family_file));
    return ModelChoice{false, own, Families(own)};
  }
  if (family == "auto") return ModelChoice{};
  if (family == "none") return ModelChoice{false, nullptr};
  if (const Family* const found = find_family(family)) return ModelChoice{false, found};
  return usage_error("'" + printable(family) + "' is not a family; there are " +
                     join(with_others({"auto", "none"}, family_names()), ", "));
}

void SourceOptions::add(CommandLine& line) {
  line.add_option(
          "--source-layout", layout,
          "How the files of ranks join, where they do not say: a layout file or one of " + builtin_layout_names())
      .read();
  line.add_option("--source-mesh", mesh, "Their mesh, where the layout has none, e.g. tp=4 (default: tp)");
  line.add_option("--strip-prefix", strip_prefix,
                  "What wraps the names of the model's tensors, 'app.model.'; what lies beside it is other state "
                  "(default: found by the names)");
  line.add_option("--part", part,
                  "One part of a training state: model, optimizer, ema, ... (inspect shows them); an average of the "
                  "weights, or one of several models, then stands for the model");
  line.add_option("--rename", renames,
                  "FROM=TO: these whole parts of names are taken for others, 'transformer.h=model.layers'")
      .one_value_each();
  line.add_option(
          "--weights", weights,
          "Of a training state that has its parameters twice: model (as the model computes with them) or master "
          "(the optimizer's float32)")
      .suggests({"model", "master"})
      .shows_default();
}

Result<Weights> SourceOptions::which_weights() const {
  if (weights == "model") return Weights::kModel;
  if (weights == "master") return Weights::kMaster;
  return usage_error("--weights '" + printable(weights) + "': there are model and master");
}

namespace {

// Whether `name` is one or more components, none of them empty: "model.layers", and not "", ".model" or "model.".
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

namespace {

std::vector<const Format*> target_formats() {
  std::vector<const Format*> out;
  for (const Format* f : formats())
    if (f->lay_out || f->write_view) out.push_back(f);
  return out;
}

// "dcp (PyTorch DCP), ..."
std::string titles_of(const std::vector<const Format*>& formats) {
  std::vector<std::string> names;
  for (const Format* f : formats) names.push_back(std::string(f->name) + " (" + std::string(f->title) + ")");
  return join(names, ", ");
}

std::vector<std::string> names_of(const std::vector<const Format*>& formats) {
  std::vector<std::string> names;
  for (const Format* f : formats) names.emplace_back(f->name);
  return names;
}

// The formats of which that is so: "dcp, ranks".
std::string formats_where(bool (*is)(const Format&)) {
  std::vector<const Format*> out = target_formats();
  std::erase_if(out, [&](const Format* f) { return !is(*f); });
  return join(names_of(out), ", ");
}
bool takes_mesh(const Format& f) { return f.takes_mesh(); }
bool takes_container(const Format& f) { return f.takes_container; }
bool takes_compression(const Format& f) { return f.takes_compression; }
bool is_cut_by_size(const Format& f) { return f.max_file_bytes > 0; }
bool is_file(const Format& f) { return f.is_file; }
bool keeps_names(const Format& f) { return !f.hf_names && f.own_names.empty(); }

// That an option means something for the target.
Status check_is_for(std::string_view option, bool given, bool (*is)(const Format&), const Format& format) {
  if (!given || is(format)) return {};
  return usage_error(std::string(option) + " is for --to " + formats_where(is) + ", and not for " +
                     std::string(format.name));
}

}  // namespace

void ConvertOptions::add(CommandLine& line, bool destination_required) {
  line.add_option("SRC", source, "The checkpoint: a directory or a file of any format that inspect knows")
      .read()
      .required();
  line.add_option("DST", destination, "The directory to make; for --to " + formats_where(is_file) + " the file")
      .written()
      .required(destination_required);
  add_format(line);
  add_changes(line);
}

void ConvertOptions::add_format(CommandLine& line, const std::string& option, const std::string& title, bool views) {
  std::vector<const Format*> targets = target_formats();
  if (!views) std::erase_if(targets, [](const Format* f) { return !f->lay_out; });
  line.add_option(option, to, title + ": " + titles_of(targets)).suggests(names_of(targets)).required();
}

void ConvertOptions::add_changes(CommandLine& line) {
  line.add_option("--names", names,
                  "Output names: " + join(convention_options(), ", ") +
                      ", colossalai (as hf), keep (default: keep for --to " + formats_where(keeps_names) +
                      ", what its loaders expect otherwise); torchtitan's are those until April 2026")
      .suggests(with_others({"keep"}, convention_options()));
  line.add_option(
      "--mesh", mesh,
      "Target mesh for --to " + formats_where(takes_mesh) + ", e.g. tp=4,dp_shard=2,pp=2 (default: one rank)");
  line.add_option("--layout", layout,
                  "Target layout for --to " + formats_where(takes_mesh) +
                      ": a file (reshard layout prints them) or one of " + builtin_layout_names())
      .read();
  line.add_option(
          "--dtype", dtype,
          "Floating-point model tensors become this: keep, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2")
      .suggests({"keep", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
      .shows_default();
  line.add_option("--keep-dtype", keep_dtype, "Tensors that --dtype leaves alone (glob, repeatable)").names_tensors();
  line.add_option(
          "--quantize", quantize,
          "Matrices become smaller, beside their scales: fp8-block, float8 in blocks of 128 x 128 as DeepSeek's, "
          "fp8-tensor, float8 with one scale each, mxfp4, 4-bit floats as gpt-oss's experts")
      .one_of({"fp8-block", "fp8-tensor", "mxfp4"});
  line.add_option("--include", include, "Only tensors and objects of this name (glob, repeatable)").names_tensors();
  line.add_option("--exclude", exclude, "No tensors and objects of this name (glob, repeatable)").names_tensors();
  line.add_option(
      "--max-shard-size", max_shard_size,
      "Largest file of --to " + formats_where(is_cut_by_size) + " (default: 5GB, or what its own saver takes)");
  line.add_option("--shard-format", shard_format,
                  "Container of --to " + formats_where(takes_container) + ": safetensors (default) or bin (torch.save)")
      .one_of({"safetensors", "bin"});
  line.add_option(
          "--strategy", strategy,
          "On several ranks (mpirun): direct, each reads what it writes; exchange, each byte is read once and sent "
          "to the rank that writes it; auto: what is estimated to be faster")
      .one_of({"auto", "direct", "exchange"})
      .shows_default();
  line.add_option(
          "--codec", codec,
          "Compression of --to " + formats_where(takes_compression) + ": none, or zstd:LEVEL with a level of 1 to 19")
      .shows_default();
  line.add_flag("--shuffle,!--no-shuffle", shuffle,
                "Whether the bytes of elements are grouped before they are compressed")
      .shows_default();
  line.add_option(
          "--allow", allow,
          "Let faults of the source through: cover (leave out tensors that are not stored exactly once), config "
          "(write tensors that are not as the config says), external (read data that an HDF5 file says are in other "
          "files), objects (copy objects that may run code when they are loaded)")
      .one_of({"cover", "config", "external", "objects"});
  line.add_option("--repair", repair,
                  "Mend the source: vocab (cut rows beyond the vocabulary that are not zeros, take missing ones from "
                  "--donor), experts (split matrices that hold the rows of several experts)")
      .one_of({"vocab", "experts"});
  line.add_option("--donor", donor, "A checkpoint that has the rows the source lost, for --repair vocab").read();
  line.add_option("--vocab-divisible-by", vocab_divisible_by,
                  "Pad the vocabulary to a multiple of this times tp (make_vocab_size_divisible_by)")
      .within(Index{1}, Index{1} << 20);
  line.add_option("--vocab-padding", vocab_padding, "What rows that pad a vocabulary become: zero, repeat-last, mean")
      .one_of({"zero", "repeat-last", "mean"});
  line.add_flag("--merge-adapter", merge_adapter, "Add a LoRA adapter to the weights, as PEFT's merge_and_unload does");
  line.add_option("--adapter", adapter, "Where the adapter is, for --merge-adapter (default: in SRC)").read();
  line.add_option("--lora-alpha", lora_alpha, "The adapter's alpha, where no adapter_config.json beside it says it");
  line.add_flag("--keep-unknown", keep_unknown, "Carry tensors whose name the family does not know");
  source_layout.add(line);
  model.add(line);
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
  o.keep_names = names == "keep";
  o.convention = find_convention(names);
  if (o.convention || o.keep_names) return {};
  return usage_error("'" + printable(names) + "' are no names; there are " + join(convention_options(), ", ") +
                     ", colossalai, keep");
}

Result<ConversionOptions> ConvertOptions::conversion_options() const {
  ConversionOptions o;
  o.source_path = source;
  o.model = TRY(model.choice());
  TRY(read_names(o));
  if (o.convention && o.model.is_none())
    return usage_error("--names " + names + " needs a family; --family none keeps names");
  o.config_path = model.config;
  o.part = source_layout.part;
  const Format* format = TRY(find_format(to));
  if (!format->takes_mesh() && !(mesh.empty() && layout.empty()))
    return usage_error(std::string(mesh.empty() ? "--layout" : "--mesh") + " is for --to " + formats_where(takes_mesh) +
                       "; the files of --to " + to + " are not cut by rank");
  if (format->sharding == Sharding::kOwnLocal && o.model.is_none() && !mesh.empty())
    return usage_error("--to " + to +
                       " cuts tensors between the heads of a model; --family none says that there is none");
  o.compression = TRY(parse_codec(codec, shuffle));
  TRY(check_is_for("--codec", o.compression.zstd_level > 0, takes_compression, *format));
  TRY(check_is_for("--shard-format", !shard_format.empty(), takes_container, *format));
  TRY(check_is_for("--max-shard-size", !max_shard_size.empty(), is_cut_by_size, *format));
  if (!layout.empty()) {
    o.layout = TRY(load_layout(layout, mesh));
    if (!o.layout->mesh)
      return usage_error("layout '" + printable(o.layout->name) + "' has no mesh; give it one (--mesh)");
    o.mesh = *o.layout->mesh;
  } else if (!mesh.empty()) {
    o.mesh = TRY(Mesh::parse(mesh));
  }
  if (dtype != "keep") {
    o.dtype = dtype_from_torch(dtype);
    if (!o.dtype || !can_convert(DType::kFloat32, *o.dtype) || *o.dtype == DType::kFloat64)
      return usage_error(
          "'" + printable(dtype) +
          "' is no target dtype; there are keep, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2");
  }
  o.keep_dtype = keep_dtype;
  for (const auto& [name, quantization] : kQuantizations)
    if (quantize == name) o.quantize = quantization;
  if (!quantize.empty() && merge) return usage_error("--quantize: merge first, and quantize what comes out");
  o.include = include;
  o.exclude = exclude;
  if (is_cut_by_size(*format))
    o.max_file_bytes = max_shard_size.empty() ? format->max_file_bytes : TRY(parse_bytes(max_shard_size));
  if (o.max_file_bytes < 1) return usage_error("--max-shard-size: expected a positive size");
  o.container = shard_format == "bin" ? Container::kTorchSave : Container::kSafetensors;
  o.keep_unknown = keep_unknown;
  o.repairs.vocabulary = std::find(repair.begin(), repair.end(), "vocab") != repair.end();
  o.repairs.experts = std::find(repair.begin(), repair.end(), "experts") != repair.end();
  if (!donor.empty() && !o.repairs.vocabulary) return usage_error("--donor is for --repair vocab");
  if (!adapter.empty() && !merge_adapter) return usage_error("--adapter is for --merge-adapter");
  o.merge_adapter = merge_adapter;
  if (!lora_alpha.empty()) {
    const auto json = parse_json(lora_alpha, "--lora-alpha");
    if (!json || !json->is_number())
      return usage_error("--lora-alpha: expected a number, got '" + printable(lora_alpha) + "'");
    o.adapter.alpha = TRY(json->as_double());
  }
  o.vocab_divisible_by = vocab_divisible_by;
  if (!vocab_padding.empty()) o.vocab_padding = padding_fill(vocab_padding);
  o.allow.cover = std::find(allow.begin(), allow.end(), "cover") != allow.end();
  o.allow.config = std::find(allow.begin(), allow.end(), "config") != allow.end();
  o.spool = destination.empty() ? "." : parent_path(destination);
  o.run = TRY(resources.run_options());
  return o;
}

std::string temporary_directory() {
  const std::string directory = environment_variable("TMPDIR");
  return directory.empty() ? "/tmp" : directory;
}

}  // namespace reshard::tools
