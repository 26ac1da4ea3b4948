// SPDX-License-Identifier: Apache-2.0
#include "formats/pickle_allowlist.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "formats/encoding/torch_archive.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// Globals of Python, NumPy and torch that make data. Only whole names are allowed, as every module also has functions
// that run code they are given.
struct DataNames {
  std::string_view module;
  std::string_view names;  // separated by blanks
};
constexpr std::array kDataNames = {
    DataNames{"builtins", " set frozenset list dict tuple int float complex bool str bytes bytearray slice range "},
    DataNames{"__builtin__",  // names in protocol 2, which torch.save uses
              " set frozenset list dict tuple int long float complex bool str unicode bytes bytearray slice xrange "},
    DataNames{"_codecs", " encode "},
    DataNames{"_io", " BytesIO "},
    DataNames{"io", " BytesIO "},
    DataNames{"argparse", " Namespace "},
    DataNames{"collections", " Counter OrderedDict defaultdict deque "},
    DataNames{"datetime", " date datetime timedelta timezone "},
    DataNames{"decimal", " Decimal "},
    DataNames{"fractions", " Fraction "},
    DataNames{"pathlib", " PosixPath PurePosixPath WindowsPath "},
    DataNames{"pathlib._local", " PosixPath PurePosixPath WindowsPath "},
    DataNames{"signal", " Signals "},
    DataNames{"types", " SimpleNamespace "},
    DataNames{"numpy", " dtype ndarray "},
    DataNames{"numpy._core.multiarray", " _reconstruct scalar "},
    DataNames{"numpy._core.numeric", " _frombuffer "},
    DataNames{"numpy.core.multiarray", " _reconstruct scalar "},
    DataNames{"numpy.core.numeric", " _frombuffer "},
    DataNames{"numpy.random._mt19937", " MT19937 "},
    DataNames{"numpy.random.bit_generator", " SeedSequence __pyx_unpickle_SeedSequence "},
    DataNames{"numpy.random._pcg64", " PCG64 "},
    DataNames{"numpy.random._pickle", " __bit_generator_ctor __generator_ctor __randomstate_ctor "},
    DataNames{"torch", " Size Tensor device "},
    DataNames{"torch._tensor", " _rebuild_from_type_v2 "},
    DataNames{"torch._utils", " _rebuild_parameter _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "},
    DataNames{"torch.nn.parameter", " Parameter "},
    DataNames{"torch.serialization", " _get_layout "},
    DataNames{"torch.storage", " TypedStorage UntypedStorage "}};
// Classes of megatron.core, in any module, because they move between releases.
constexpr std::string_view kMegatronNames =
    " AttnBackend AttnMaskType AttnType CudaGraphScope Fp4Recipe Fp8Recipe InferenceCudaGraphScope LayerType ModelType "
    "QuickStats RerunDiagnostic RerunMode RerunState ";

bool is_among(std::string_view name, std::string_view names) {
  return names.find(" " + std::string(name) + " ") != std::string_view::npos;
}

// Returns whether a global makes data, or is a dtype or the class of a storage.
bool makes_data(std::string_view global) {
  const std::size_t dot = global.rfind('.');
  if (dot == std::string_view::npos) return false;
  const std::string_view module = global.substr(0, dot), name = global.substr(dot + 1);
  if (module == "torch" && (name.ends_with("Storage") || dtype_from_torch(name))) return true;
  if (module.starts_with("megatron.core.") && is_among(name, kMegatronNames)) return true;
  return std::any_of(kDataNames.begin(), kDataNames.end(),
                     [&](const DataNames& d) { return d.module == module && is_among(name, d.names); });
}

}  // namespace

Status check_inert(Reader& source, const std::vector<Blob>& objects) {
  for (const Blob& object : objects) {
    const std::string what = "object '" + printable(object.name) + "'";
    const std::string bytes = TRY(source.blob_bytes(object));
    const auto pickle = TRY(torch_archive::read_object_item(bytes).context(what));
    for (const std::string& name : pickle.globals())
      if (!makes_data(name))
        return unsupported(
            what + ": its pickle names '" + printable(name) +
            "', which runs when the object is loaded; add --exclude to leave the object out, or --allow objects " +
            "to copy it as it is");
  }
  return {};
}

}  // namespace reshard
