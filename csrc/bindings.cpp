// [1] Python's side of the library: arrays become TensorViews, the GIL is released around plan and
// run, errors become Python's. What is asked is decided in functional.py, what is valid in
// make_params.cpp; nothing is copied or converted here.
#include <fa101/attention.h>
#include <fa101/kv_cache.h>
#include <fa101/memory.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace fa101 {
namespace {

// ---- arrays -------------------------------------------------------------------------------------

// DLPack's C exchange API (dmlc/dlpack, dlpack.h 1.3), as far as it is used here. A type that has
// it offers these functions in a capsule; borrowing a tensor costs a tenth of calling __dlpack__.
struct ManagedTensor {
    uint32_t major, minor;
    void* context;
    void (*release)(ManagedTensor* self);
    uint64_t flags;
    nb::dlpack::dltensor tensor;
};
struct ExchangeApi {
    uint32_t major, minor;
    const ExchangeApi* previous;  // for consumers of an older major version
    int (*allocate)(nb::dlpack::dltensor* like, ManagedTensor** made, void* context,
                    void (*set_error)(void* context, const char* kind, const char* message));
    void *export_object, *import_object;
    int (*borrow)(void* object, nb::dlpack::dltensor* tensor);
    int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

const ExchangeApi* find_exchange_api(nb::handle type) {
    static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    const nb::object capsule = nb::getattr(type, nb::handle(name), nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    auto* api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->major != 1) api = api->previous;
    return api != nullptr && api->borrow != nullptr ? api : nullptr;
}

// The arrays of a call are nearly always of one type: that of the last is kept, and alive.
const ExchangeApi* exchange_api(nb::handle array) {
    static PyObject* last_type = nullptr;
    static const ExchangeApi* last_api = nullptr;
    const nb::handle type = array.type();
    if (type.ptr() != last_type) {
        last_api = find_exchange_api(type);
        Py_XDECREF(std::exchange(last_type, type.inc_ref().ptr()));
    }
    return last_api;
}

bool requires_grad(nb::handle array) {
    static PyObject* const attribute = PyUnicode_InternFromString("requires_grad");
    return nb::getattr(array, nb::handle(attribute), nb::none()).is(nb::handle(Py_True));
}

// The exchange API and torch's own to_dlpack hand out tensors that require grad: the result would
// have no gradient and nobody would notice.
void refuse_lost_gradient(nb::handle array, const char* name) {
    if (!requires_grad(array)) return;
    const nb::object torch = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
    if (torch.is_valid() && !nb::cast<bool>(torch.attr("is_grad_enabled")())) return;
    throw std::runtime_error(std::string(name) +
                             " requires grad, but fa101 has no backward yet "
                             "and its gradient would be lost; call under torch.no_grad() or pass " +
                             name + ".detach()");
}

// What Python hands in, an array or None; and what the exchange API has said of it, if it was
// asked: then the array has no gradient to lose.
struct Argument {
    Argument() = default;
    Argument(nb::handle source) : source(source) {}
    bool is_none() const { return source.is_none(); }

    nb::handle source;
    std::optional<nb::dlpack::dltensor> tensor;
};

enum class Access { kRead, kWrite };

// An array borrowed for one call.
class Array {
  public:
    Array(const Argument& argument, const char* name, Access access) {
        if (argument.tensor) {
            tensor_ = *argument.tensor;
        } else {
            refuse_lost_gradient(argument.source, name);
            borrow(argument.source, name, access);
        }
        int64_t size = 1;
        for (int i = 0; i < tensor_.ndim; ++i) size *= tensor_.shape[i];
        if (size != 0 && tensor_.data == nullptr) {
            throw InvalidType(std::string(name) +
                              " has no memory behind it; fake and traced "
                              "tensors cannot be computed with");
        }
    }

    const nb::dlpack::dltensor& tensor() const { return tensor_; }
    bool read_only() const { return read_only_; }
    void* data() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }

  private:
    void borrow(nb::handle source, const char* name, Access access) {
        const ExchangeApi* api = exchange_api(source);
        if (api == nullptr) return import(source, name, access);
        if (api->borrow(source.ptr(), &tensor_) != 0) {
            nb::python_error error;
            std::string reason = nb::str(error.value()).c_str();
            reason.resize(std::min(reason.find('\n'), reason.size()));  // a stack follows
            nb::raise_from(error, PyExc_TypeError, "%s cannot be read as a dense array: %s", name,
                           reason.c_str());
        }
    }

    void import(nb::handle source, const char* name, Access access) {
        nb::ndarray<> writable;
        if (access == Access::kWrite && nb::try_cast(source, writable, false)) {
            owner_ = nb::ndarray<nb::ro>(writable);
        } else if (nb::try_cast(source, owner_, false)) {
            read_only_ = access == Access::kWrite;
        } else {
            throw InvalidType(std::string(name) + " is a " + nb::type_name(source.type()).c_str() +
                              " that gives no float32, float16 or bfloat16 array through DLPack or "
                              "the buffer protocol");
        }
        tensor_.data = const_cast<void*>(owner_.data());
        tensor_.device = {owner_.device_type(), owner_.device_id()};
        tensor_.ndim = static_cast<int32_t>(owner_.ndim());
        tensor_.dtype = owner_.dtype();
        tensor_.shape = const_cast<int64_t*>(owner_.shape_ptr());
        tensor_.strides = const_cast<int64_t*>(owner_.stride_ptr());
    }

    nb::dlpack::dltensor tensor_;
    nb::ndarray<nb::ro> owner_;  // holds what __dlpack__ or the buffer protocol exported
    bool read_only_ = false;
};

std::string describe(nb::dlpack::dtype dtype) {
    static constexpr const char* kCodes[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
    if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bool)) return "bool";
    const bool known = dtype.code < std::size(kCodes);
    return (known ? kCodes[dtype.code] : "of DLPack code " + std::to_string(dtype.code) + " and ") +
           std::to_string(dtype.bits) + (known ? "" : " bits");
}

DType dtype_of(nb::dlpack::dtype dtype, const char* name) {
    using Code = nb::dlpack::dtype_code;
    const auto is = [&](Code code, int bits) {
        return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(Code::Float, 32)) return DType::kFloat32;
    if (is(Code::Float, 16)) return DType::kFloat16;
    if (is(Code::Bfloat, 16)) return DType::kBFloat16;
    if (is(Code::Int, 32)) return DType::kInt32;
    if (is(Code::Bool, 8)) return DType::kBool;
    if (is(Code::Float8_E4M3FN, 8)) return DType::kFloat8E4M3;
    const std::string_view argument = name;
    throw InvalidType(std::string(name) + " has dtype " + describe(dtype) + "; it must be " +
                      (argument == "mask"         ? "bool"
                       : argument == "seqlens_k"  ? "int32"
                       : argument == "page_table" ? "int32"
                       : argument == "k_descale"  ? "float32"
                       : argument == "v_descale"  ? "float32"
                                                  : "float32, float16 or bfloat16"));
}

Device device_of(nb::dlpack::device device, const char* name) {
    switch (device.device_type) {
        case nb::device::cpu::value:
        case nb::device::cuda_host::value:
            return {DeviceType::kCpu, 0};
        case nb::device::cuda::value:
        case nb::device::cuda_managed::value:
            return {DeviceType::kCuda, device.device_id};
        default:
            throw InvalidArgument(std::string(name) + " is on a device of DLPack type " +
                                  std::to_string(device.device_type) +
                                  "; it must be on CPU or CUDA");
    }
}

TensorView view_of(const Array& array, const char* name, nb::dlpack::dtype dtype) {
    const nb::dlpack::dltensor& t = array.tensor();
    TensorView view;
    view.data = array.data();
    view.dtype = dtype_of(dtype, name);
    view.device = device_of(t.device, name);
    view.ndim = t.ndim;  // more than kMaxDims is for make_params to refuse
    view.read_only = array.read_only();
    int64_t dense = 1;
    for (int i = std::min(t.ndim, kMaxDims) - 1; i >= 0; --i) {
        view.shape[i] = t.shape[i];
        view.strides[i] = t.strides != nullptr ? t.strides[i] : dense;
        dense *= t.shape[i];
    }
    return view;
}

TensorView view_of(const Array& array, const char* name) {
    return view_of(array, name, array.tensor().dtype);
}

constexpr nb::dlpack::dtype kBFloat16{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
constexpr nb::dlpack::dtype kFloat8E4M3{static_cast<uint8_t>(nb::dlpack::dtype_code::Float8_E4M3FN),
                                        8, 1};

// A cache of bytes is the bits of fp8, of those who cannot export it, if a descale says so.
TensorView cache_view_of(const Array& array, const char* name, const char* descale_name,
                         bool has_descale) {
    if (array.tensor().dtype != nb::dtype<uint8_t>()) return view_of(array, name);
    if (!has_descale) {
        throw InvalidType(std::string(name) + " has dtype uint8, which without " + descale_name +
                          " is not taken for the bits of float8_e4m3fn; view it as that dtype or "
                          "give " +
                          descale_name);
    }
    return view_of(array, name, kFloat8E4M3);
}

// ---- options ------------------------------------------------------------------------------------

template <class Enum>
Enum choice(const char* name, const std::string& value, const char* first, Enum if_first,
            const char* second, Enum if_second) {
    if (value == first) return if_first;
    if (value == second) return if_second;
    throw InvalidArgument(std::string(name) + " is '" + value + "'; it must be '" + first +
                          "' or '" + second + "'");
}

// An array that may be None.
struct OptionalArray {
    OptionalArray(const Argument& argument, const char* name, Access access) {
        if (argument.is_none()) return;
        array.emplace(argument, name, access);
        view = view_of(*array, name);
    }
    const TensorView* get() const { return view ? &*view : nullptr; }

    std::optional<Array> array;
    std::optional<TensorView> view;
};

// What a call asks besides its arrays. Checked once: Python keeps it and asks again.
struct Asked {
    Asked(bool causal, std::optional<int64_t> window_left, std::optional<int64_t> window_right,
          const std::string& align, std::optional<double> softmax_scale, double softcap,
          const std::string& layout, int64_t num_splits, std::string kernel, std::string strategy)
        : kernel(std::move(kernel)), strategy(std::move(strategy)) {
        options.causal = causal;
        options.window_left = window_left;
        options.window_right = window_right;
        options.softcap = static_cast<float>(softcap);
        options.align = choice("align", align, "top_left", Align::kTopLeft, "bottom_right",
                               Align::kBottomRight);
        options.layout = choice("layout", layout, "bhsd", Layout::kBHSD, "bshd", Layout::kBSHD);
        if (softmax_scale) options.softmax_scale = static_cast<float>(*softmax_scale);
        options.num_splits = num_splits;
    }

    Options options;  // no arrays in it
    std::string kernel, strategy;
};

// What the planner knows of the device; the caller's limit on threads counts too.
DeviceInfo limited_device_info(Device device, int num_threads) {
    DeviceInfo info = device_info(device);
    if (num_threads > 0) info.num_threads = std::min(info.num_threads, num_threads);
    return info;
}

// One call of forward() or explain(): its arguments, checked.
struct Call {
    Call(const Argument& q, const Argument& k, const Argument& v, const Argument& out,
         const Argument& lse, const Argument& bias, const Argument& mask, const Argument& seqlens_k,
         const Asked& asked)
        : q_array(q, "q", Access::kRead),
          k_array(k, "k", Access::kRead),
          v_array(v, "v", Access::kRead),
          out_array(out, "out", Access::kWrite),
          lse_array(lse, "lse", Access::kWrite),
          bias_array(bias, "bias", Access::kRead),
          mask_array(mask, "mask", Access::kRead),
          seqlens_k_array(seqlens_k, "seqlens_k", Access::kRead) {
        Options options = asked.options;
        options.bias = bias_array.get();
        options.mask = mask_array.get();
        options.seqlens_k = seqlens_k_array.get();

        const TensorView q_view = view_of(q_array, "q");
        device = q_view.device;
        params = make_params(q_view, view_of(k_array, "k"), view_of(v_array, "v"),
                             view_of(out_array, "out"), lse_array.get(), options);
    }

    Array q_array, k_array, v_array, out_array;
    OptionalArray lse_array, bias_array, mask_array, seqlens_k_array;
    Device device;
    Params params;
};

// The same of forward_with_kvcache() and explain_with_kvcache().
struct CachedCall {
    CachedCall(const Argument& q, const Argument& k_cache, const Argument& v_cache,
               const Argument& out, const Argument& lse, const Argument& k, const Argument& v,
               const Argument& seqlens_k, const Argument& page_table, const Argument& k_descale,
               const Argument& v_descale, const Argument& cos, const Argument& sin,
               const Argument& q_rotated, bool interleaved, const Asked& asked)
        : appends(need_both(k, v, cos)),
          q_array(q, "q", Access::kRead),
          k_cache_array(k_cache, "k_cache", appends ? Access::kWrite : Access::kRead),
          v_cache_array(v_cache, "v_cache", appends ? Access::kWrite : Access::kRead),
          out_array(out, "out", Access::kWrite),
          lse_array(lse, "lse", Access::kWrite),
          k_array(k, "k", Access::kRead),
          v_array(v, "v", Access::kRead),
          lengths_array(seqlens_k, "seqlens_k", Access::kRead),
          table_array(page_table, "page_table", Access::kRead),
          k_descale_array(k_descale, "k_descale", Access::kRead),
          v_descale_array(v_descale, "v_descale", Access::kRead),
          cos_array(cos, "cos", Access::kRead),
          sin_array(sin, "sin", Access::kRead),
          rotated_array(q_rotated, "q_rotated", Access::kWrite) {
        const TensorView q_view = view_of(q_array, "q");
        const TensorView k_cache_view =
            cache_view_of(k_cache_array, "k_cache", "k_descale", k_descale_array.get() != nullptr);
        const TensorView v_cache_view =
            cache_view_of(v_cache_array, "v_cache", "v_descale", v_descale_array.get() != nullptr);
        const TensorView out_view = view_of(out_array, "out");
        device = q_view.device;

        Options options = asked.options;
        options.seqlens_k = lengths_array.get();
        options.page_table = table_array.get();
        options.k_descale = k_descale_array.get(), options.v_descale = v_descale_array.get();
        options.k_name = "k_cache", options.v_name = "v_cache";
        if (appends) {
            AppendOptions append_options;
            append_options.layout = options.layout;
            append_options.seqlens_k = options.seqlens_k;
            append_options.page_table = options.page_table;
            append_options.k_descale = options.k_descale;
            append_options.v_descale = options.v_descale;
            append_options.cos = cos_array.get(), append_options.sin = sin_array.get();
            append_options.interleaved = interleaved;
            append_options.q = &q_view, append_options.q_rotated = rotated_array.get();
            append_options.out = &out_view, append_options.lse = lse_array.get();
            append_options.queries_advance =
                options.causal || options.window_left || options.window_right;
            new_keys = make_append_params(*k_array.get(), *v_array.get(), k_cache_view,
                                          v_cache_view, append_options);
            options.seqlen_new = new_keys->k.rows;
        }
        const TensorView* const rotated = rotated_array.get();
        params = make_params(rotated != nullptr ? *rotated : q_view, k_cache_view, v_cache_view,
                             out_view, lse_array.get(), options);
    }

    bool appends;
    Array q_array, k_cache_array, v_cache_array, out_array;
    OptionalArray lse_array, k_array, v_array, lengths_array, table_array, k_descale_array,
        v_descale_array, cos_array, sin_array, rotated_array;
    Device device;
    std::optional<AppendParams> new_keys;
    Params params;

  private:
    // Whether there are new keys.
    static bool need_both(const Argument& k, const Argument& v, const Argument& cos) {
        if (k.is_none() != v.is_none()) {
            throw InvalidArgument("k and v must both be there or both be absent");
        }
        if (k.is_none() && !cos.is_none()) {
            throw InvalidArgument("rotary is given without k and v, the keys that it rotates");
        }
        return !k.is_none();
    }
};

// What make(*arguments) gave before, from `kept`, or gives now: for arguments equal in value and in
// type (1 is equal to True), in a tuple's items too. Like functools.lru_cache, but torch.compile,
// which looks into that and warns, leaves compiled functions alone.
nb::object remember(nb::dict kept, nb::handle make, const nb::args& arguments) {
    constexpr size_t kMost = 256;
    // A call in a loop has the very same arguments; hashing them takes three times as long.
    struct Recent {
        nb::object kept;
        nb::tuple arguments;
        nb::object answer;
    };
    static std::array<Recent, 4>& recent = *new std::array<Recent, 4>;  // Python is gone by exit
    static size_t oldest = 0;
    const auto are_these = [&](const Recent& r) {
        return r.kept.is(kept) && r.arguments.size() == arguments.size() &&
               std::equal(arguments.begin(), arguments.end(), r.arguments.begin(),
                          [](nb::handle a, nb::handle b) { return a.is(b); });
    };
    for (const Recent& r : recent) {
        if (are_these(r)) return r.answer;
    }

    nb::list key;
    for (const nb::handle argument : arguments) {
        key.append(argument);
        key.append(argument.type());
        if (!PyTuple_Check(argument.ptr())) continue;
        for (const nb::handle item : nb::borrow<nb::tuple>(argument)) key.append(item.type());
    }
    const nb::tuple hashed(key);
    nb::object answer = nb::borrow(PyDict_GetItemWithError(kept.ptr(), hashed.ptr()));
    const bool is_hashable = PyErr_Occurred() == nullptr;
    PyErr_Clear();
    if (!answer.is_valid()) answer = make(*arguments);
    if (is_hashable) {
        if (kept.size() >= kMost) kept.clear();
        kept[hashed] = answer;
        Recent replaced{kept, arguments, answer};
        std::swap(recent[oldest], replaced);
        oldest = (oldest + 1) % recent.size();  // before `replaced` goes, which may call again
    }
    return answer;
}

// ---- functions ----------------------------------------------------------------------------------

// plan(), or what it said before: a model asks the same in each of its layers. The last answers of
// each thread are kept.
std::shared_ptr<const Plan> plan_again(const Problem& problem, Device device, int num_threads,
                                       const Asked& asked) {
    struct Answer {
        Problem problem;
        Device device;
        int num_threads;
        std::string kernel, strategy;
        std::shared_ptr<const Plan> plan;
    };
    static thread_local std::array<Answer, 8> answers;
    static thread_local size_t oldest = 0;

    const int limit = device.type == DeviceType::kCpu ? cpu_threads() : 0;
    const int threads = num_threads > 0 ? std::min(limit, num_threads) : limit;
    for (const Answer& answer : answers) {
        if (answer.plan != nullptr && answer.problem == problem && answer.device == device &&
            answer.num_threads == threads && answer.kernel == asked.kernel &&
            answer.strategy == asked.strategy) {
            return answer.plan;
        }
    }
    auto made = std::make_shared<const Plan>(
        plan(problem, limited_device_info(device, num_threads), asked.kernel, asked.strategy));
    answers[oldest] = {problem, device, threads, asked.kernel, asked.strategy, made};
    oldest = (oldest + 1) % answers.size();
    return made;
}

// Takes the GIL. Where a daemon thread asks for it while the interpreter shuts down, Python before
// 3.14 ends the thread by unwinding its stack, which nanobind's noexcept frames turn into an abort.
// The thread stays here instead, as it does from 3.14 on.
template <class Take>
void take_gil(const Take& take) {
    try {
        take();
    } catch (...) {
        while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    }
}

class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        take_gil([this] { PyEval_RestoreThread(state_); });
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

class WithGil {
  public:
    WithGil() {
        take_gil([this] { state_ = PyGILState_Ensure(); });
    }
    ~WithGil() { PyGILState_Release(state_); }
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;

  private:
    PyGILState_STATE state_;
};

// Workspace from allocate(bytes) of Python's. It is given back after the launch, which is not too
// early: allocators work in the stream's order.
class PythonAllocator {
  public:
    explicit PythonAllocator(nb::handle allocate) : allocate_(allocate) {}

    void* operator()(int64_t bytes) {
        if (allocate_.is_none()) return nullptr;
        const WithGil gil;
        memory_ = allocate_(bytes);
        array_.emplace(memory_, "workspace", Access::kWrite);
        return array_->data();
    }

  private:
    nb::handle allocate_;
    nb::object memory_;
    std::optional<Array> array_;
};

constexpr uintptr_t kWorkspaceAlignment = 256;

// Plans, finds workspace and runs; without the GIL.
template <class Allocator, class Run>
void plan_and_run(const Params& params, Device device, const Asked& asked, Allocator& allocate,
                  int num_threads, const Run& run_plan) {
    const Problem& problem = params.problem;
    const WithoutGil nogil;
    const std::shared_ptr<const Plan> plan = plan_again(problem, device, num_threads, asked);
    void* workspace = nullptr;
    if (plan->workspace_bytes > 0 && !problem.is_empty()) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(
            allocate(plan->workspace_bytes + static_cast<int64_t>(kWorkspaceAlignment) - 1));
        workspace = reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) &
                                            ~(kWorkspaceAlignment - 1));
    }
    run_plan(*plan, workspace);
}

template <class Allocator>
void run_call(const Call& call, const Asked& asked, Stream stream, Allocator& allocate,
              int num_threads) {
    plan_and_run(call.params, call.device, asked, allocate, num_threads,
                 [&](const Plan& plan, void* workspace) {
                     run(plan, call.params.problem, call.params.tensors, workspace, stream);
                 });
}

template <class Allocator>
void run_call(const CachedCall& call, const Asked& asked, Stream stream, Allocator& allocate,
              int num_threads) {
    const auto run_plan = [&](const Plan& plan, void* workspace) {
        const Problem& problem = call.params.problem;
        const Tensors& tensors = call.params.tensors;
        if (call.new_keys) {
            append_and_run(*call.new_keys, plan, problem, tensors, workspace, stream);
        } else {
            run(plan, problem, tensors, workspace, stream);
        }
    };
    plan_and_run(call.params, call.device, asked, allocate, num_threads, run_plan);
}

void forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
             nb::handle bias, nb::handle mask, nb::handle seqlens_k, const Asked& asked,
             uintptr_t stream, nb::handle allocate, int num_threads) {
    PythonAllocator allocator(allocate);
    const Call call(q, k, v, out, lse, bias, mask, seqlens_k, asked);
    run_call(call, asked, reinterpret_cast<Stream>(stream), allocator, num_threads);
}

void forward_with_kvcache(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle out,
                          nb::handle lse, nb::handle k, nb::handle v, nb::handle seqlens_k,
                          nb::handle page_table, nb::handle k_descale, nb::handle v_descale,
                          nb::handle cos, nb::handle sin, nb::handle q_rotated, bool interleaved,
                          const Asked& asked, uintptr_t stream, nb::handle allocate,
                          int num_threads) {
    PythonAllocator allocator(allocate);
    const CachedCall call(q, k_cache, v_cache, out, lse, k, v, seqlens_k, page_table, k_descale,
                          v_descale, cos, sin, q_rotated, interleaved, asked);
    run_call(call, asked, reinterpret_cast<Stream>(stream), allocator, num_threads);
}

// ---- torch's short way --------------------------------------------------------------------------

bool is_float(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    const bool is_float = dtype.code == static_cast<uint8_t>(Code::Float);
    const bool is_bfloat = dtype.code == static_cast<uint8_t>(Code::Bfloat);
    return dtype.lanes == 1 && ((is_float && (dtype.bits == 32 || dtype.bits == 16)) ||
                                (is_bfloat && dtype.bits == 16));
}
bool is_cache(nb::dlpack::dtype dtype) {
    return is_float(dtype) || dtype == kFloat8E4M3 || dtype == nb::dtype<uint8_t>();
}
bool is_int32(nb::dlpack::dtype dtype) { return dtype == nb::dtype<int32_t>(); }
bool is_bool(nb::dlpack::dtype dtype) { return dtype == nb::dtype<bool>(); }

// Whether the elements fill their memory, the axes in whatever order.
bool is_dense(const nb::dlpack::dltensor& t) {
    int64_t size = 1, inner = 1, before = 0;  // of all axes, and of those found from inside out
    for (int i = 0; i < t.ndim; ++i) size *= t.shape[i];
    while (inner != before) {
        before = inner;
        for (int i = 0; i < t.ndim; ++i) {
            if (t.shape[i] > 1 && t.strides[i] == inner) inner *= t.shape[i];
        }
    }
    return inner == size;
}

// Workspace of torch's own allocator, without Python. Where that fails, the long way words why.
class TorchAllocator {
  public:
    TorchAllocator(const ExchangeApi& api, nb::dlpack::device device, nb::handle python_allocator,
                   nb::handle q)
        : api_(api), device_(device), python_allocator_(python_allocator), q_(q) {}
    TorchAllocator(const TorchAllocator&) = delete;
    TorchAllocator& operator=(const TorchAllocator&) = delete;
    ~TorchAllocator() {
        if (memory_ != nullptr) memory_->release(memory_);
    }

    void* operator()(int64_t bytes) {
        nb::dlpack::dltensor like{};
        like.device = device_;
        like.ndim = 1;
        like.dtype = nb::dtype<uint8_t>();
        like.shape = &bytes;
        const auto ignore = [](void*, const char*, const char*) {};
        if (api_.allocate(&like, &memory_, nullptr, ignore) == 0) {
            return static_cast<char*>(memory_->tensor.data) + memory_->tensor.byte_offset;
        }
        const WithGil gil;
        PyErr_Clear();
        allocate_ = python_allocator_(q_);
        return fallback_.emplace(allocate_)(bytes);
    }

  private:
    const ExchangeApi& api_;
    nb::dlpack::device device_;
    nb::handle python_allocator_, q_;
    ManagedTensor* memory_ = nullptr;
    nb::object allocate_;
    std::optional<PythonAllocator> fallback_;
};

// Whole calls of plain torch tensors, with nothing of torch's underway that could make them
// stand-ins for others: nearly all calls. Anything else gives None; Python then goes the long way
// (_frameworks.py), which knows what to do or how to word the error.
class TorchCalls {
  public:
    explicit TorchCalls(nb::handle framework)
        : tensor_(framework.attr("_torch").attr("Tensor")),
          parameter_(framework.attr("_torch").attr("nn").attr("Parameter")),
          is_neg_(tensor_.attr("is_neg")),
          is_inference_(tensor_.attr("is_inference")),
          is_tracing_(framework.attr("_is_tracing")),
          transforms_(framework.attr("_transforms")),
          len_modes_(framework.attr("_len_modes")),
          forward_ad_(framework.attr("_forward_ad")),
          is_autocast_(framework.attr("_is_autocast")),
          is_grad_enabled_(framework.attr("_torch").attr("is_grad_enabled")),
          empty_like_(framework.attr("_torch").attr("empty_like")),
          empty_out_(framework.attr("empty_out")),
          empty_lse_(framework.attr("empty_lse")),
          full_int32_(framework.attr("full_int32")),
          increment_version_(nb::getattr(
              framework.attr("_torch").attr("_C"), "_increment_version",
              framework.attr("_torch").attr("autograd").attr("graph").attr("increment_version"))),
          allocator_(framework.attr("allocator")),
          num_threads_(framework.attr("num_threads")) {}

    nb::object attention(Argument q, Argument k, Argument v, Argument bias, Argument mask,
                         Argument seqlens_k, Argument out, bool return_lse, nb::handle layout,
                         const Asked& asked) const {
        if (!is_plain(q, is_float) || !is_plain(k, is_float) || !is_plain(v, is_float) ||
            !is_plain_or_none(bias, is_float) || !is_plain_or_none(mask, is_bool) ||
            !is_plain_or_none(seqlens_k, is_int32) || !is_plain_or_none(out, is_float) ||
            is_transformed(*q.tensor) ||
            loses_gradient({q.source, k.source, v.source, bias.source, out.source})) {
            return nb::none();
        }
        const nb::object result = out.is_none() ? empty_out(q, v) : nb::borrow(out.source);
        const Argument target = out.is_none() ? made(result) : out;
        const nb::object lse = return_lse ? empty_lse_(q.source, layout) : nb::none();
        run_here(Call(q, k, v, target, lse, bias, mask, seqlens_k, asked), q, asked);
        if (!out.is_none()) mark_written({out.source});
        return lse.is_none() ? result : nb::object(nb::make_tuple(result, lse));
    }

    nb::object attention_with_kvcache(Argument q, Argument k_cache, Argument v_cache, Argument k,
                                      Argument v, Argument seqlens_k, Argument page_table,
                                      Argument k_descale, Argument v_descale, Argument cos,
                                      Argument sin, bool interleaved, Argument out, bool return_lse,
                                      nb::handle layout, const Asked& asked) const {
        std::optional<int32_t> length;
        if (PyLong_CheckExact(seqlens_k.source.ptr()) && !nb::try_cast(seqlens_k.source, length))
            return nb::none();
        if (!is_plain(q, is_float) || !is_plain(k_cache, is_cache) ||
            !is_plain(v_cache, is_cache) || !is_plain_or_none(k, is_float) ||
            !is_plain_or_none(v, is_float) || (!length && !is_plain_or_none(seqlens_k, is_int32)) ||
            !is_plain_or_none(page_table, is_int32) || !is_plain_or_none(k_descale, is_float) ||
            !is_plain_or_none(v_descale, is_float) || !is_plain_or_none(cos, is_float) ||
            !is_plain_or_none(sin, is_float) || !is_plain_or_none(out, is_float) ||
            is_transformed(*q.tensor) ||
            loses_gradient({q.source, k_cache.source, v_cache.source, k.source, v.source,
                            k_descale.source, v_descale.source, cos.source, sin.source,
                            out.source})) {
            return nb::none();
        }
        const nb::object result = out.is_none() ? empty_out(q, v_cache) : nb::borrow(out.source);
        const Argument target = out.is_none() ? made(result) : out;
        const nb::object lse = return_lse ? empty_lse_(q.source, layout) : nb::none();
        const nb::object q_rotated = cos.is_none() ? nb::none() : empty_out(q, q);
        const nb::object lengths = length ? full_int32_(*length, q.tensor->shape[0], q.source)
                                          : nb::borrow(seqlens_k.source);
        const CachedCall call(q, k_cache, v_cache, target, lse, k, v, lengths, page_table,
                              k_descale, v_descale, cos, sin, q_rotated, interleaved, asked);
        if (!has_room(call, length)) return nb::none();
        run_here(call, q, asked);
        if (!k.is_none()) mark_written({k_cache.source, v_cache.source});
        if (!out.is_none()) mark_written({out.source});
        return lse.is_none() ? result : nb::object(nb::make_tuple(result, lse));
    }

  private:
    // Asks the exchange API; whether it answers.
    static bool borrow(Argument& argument) {
        const ExchangeApi* api = exchange_api(argument.source);
        if (api == nullptr) return false;
        if (api->borrow(argument.source.ptr(), &argument.tensor.emplace()) == 0) return true;
        PyErr_Clear();
        argument.tensor.reset();
        return false;
    }

    // An array of our own making.
    static Argument made(const nb::object& array) {
        Argument argument(array);
        borrow(argument);
        return argument;
    }

    // Whether it is of a plain type and has the C exchange API, and is, as it stands, dense in
    // memory (no lazy negation, nothing sparse or nested), in a dtype that `fits`, with a
    // contiguous last axis.
    template <class Fits>
    bool is_plain(Argument& argument, const Fits& fits) const {
        const nb::handle array = argument.source, type = array.type();
        if (!type.is(tensor_) && !type.is(parameter_)) return false;
        if (!borrow(argument)) return false;
        const nb::dlpack::dltensor& t = *argument.tensor;
        if (!fits(t.dtype) || t.ndim < 1 || t.strides == nullptr) return false;
        if (t.strides[t.ndim - 1] != 1 && t.shape[t.ndim - 1] != 1) return false;
        return is_neg_(array).is(nb::handle(Py_False));
    }
    template <class Fits>
    bool is_plain_or_none(Argument& argument, const Fits& fits) const {
        return argument.is_none() || is_plain(argument, fits);
    }

    // Whether something runs that an array could be a stand-in for, or that casts arrays.
    bool is_transformed(const nb::dlpack::dltensor& q) const {
        static PyObject* const level = PyUnicode_InternFromString("_current_level");
        static PyObject* const cuda = PyUnicode_InternFromString("cuda");
        static PyObject* const cpu = PyUnicode_InternFromString("cpu");
        const bool is_cuda = q.device.device_type == nb::device::cuda::value;
        return nb::cast<bool>(is_tracing_()) || !transforms_().is_none() ||
               nb::cast<int>(len_modes_()) > 0 ||
               nb::cast<int>(forward_ad_.attr(nb::handle(level))) >= 0 ||
               nb::cast<bool>(is_autocast_(nb::handle(is_cuda ? cuda : cpu)));
    }

    // Whether one of them, None or an array, has a gradient that nobody would compute.
    bool loses_gradient(std::initializer_list<nb::handle> arrays) const {
        const auto has_gradient = [](nb::handle x) { return !x.is_none() && requires_grad(x); };
        return nb::cast<bool>(is_grad_enabled_()) &&
               std::any_of(arrays.begin(), arrays.end(), has_gradient);
    }

    // empty_like gives what empty_out of Python's does, in a third of the time, where q is dense.
    nb::object empty_out(const Argument& q, const Argument& v) const {
        const auto head_dim = [](const nb::dlpack::dltensor& t) { return t.shape[t.ndim - 1]; };
        const bool is_like_q = head_dim(*q.tensor) == head_dim(*v.tensor) && is_dense(*q.tensor);
        return is_like_q ? empty_like_(q.source) : empty_out_(q.source, v.source);
    }

    // Whether the lengths that the host can read leave room for the new keys.
    static bool has_room(const CachedCall& call, std::optional<int32_t> length) {
        const Problem& problem = call.params.problem;
        const Tensors& t = call.params.tensors;
        const int64_t room = problem.seqlen_k - problem.seqlen_new;
        const auto fits = [room](int64_t n) { return 0 <= n && n <= room; };
        if (length) return fits(*length);
        if (call.device.type != DeviceType::kCpu || !problem.has_seqlens_k) return true;
        for (int64_t b = 0; b < problem.batch; ++b) {
            if (!fits(t.seqlens_k_ptr[b * t.seqlens_k_stride])) return false;
        }
        return true;
    }

    template <class AnyCall>
    void run_here(const AnyCall& call, const Argument& q, const Asked& asked) const {
        const ExchangeApi& api = *exchange_api(q.source);
        const auto [device_type, device_id] = q.tensor->device;
        TorchAllocator allocator(api, q.tensor->device, allocator_, q.source);
        if (call.device.type == DeviceType::kCpu) {
            return run_call(call, asked, nullptr, allocator, nb::cast<int>(num_threads_()));
        }
        Stream stream = nullptr;
        if (api.current_stream(device_type, device_id, &stream) != 0) throw nb::python_error();
        run_call(call, asked, stream, allocator, 0);
    }

    // What written() of Python's does, of all in one go.
    void mark_written(std::initializer_list<nb::handle> arrays) const {
        nb::list changed;
        for (const nb::handle array : arrays) {
            if (!nb::cast<bool>(is_inference_(array))) changed.append(array);
        }
        if (changed.size() > 0) increment_version_(changed);
    }

    nb::object tensor_, parameter_, is_neg_, is_inference_, is_tracing_, transforms_, len_modes_,
        forward_ad_, is_autocast_, is_grad_enabled_, empty_like_, empty_out_, empty_lse_,
        full_int32_, increment_version_, allocator_, num_threads_;
};

// ---- plans and facts ----------------------------------------------------------------------------

struct Explained {
    Plan plan;
    std::string text;
};

// new_keys: to be appended before, or null.
Explained explained(const AppendParams* new_keys, const Params& params, Device device,
                    const Asked& asked, int num_threads) {
    const DeviceInfo info = limited_device_info(device, num_threads);
    Plan p = plan(params.problem, info, asked.kernel, asked.strategy);
    std::string text = new_keys != nullptr
                           ? explain(*new_keys, p, params.problem, params.tensors, info)
                           : explain(p, params.problem, info);
    return {std::move(p), std::move(text)};
}

Explained explain_call(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                       nb::handle bias, nb::handle mask, nb::handle seqlens_k, const Asked& asked,
                       int num_threads) {
    const Call call(q, k, v, out, lse, bias, mask, seqlens_k, asked);
    return explained(nullptr, call.params, call.device, asked, num_threads);
}

Explained explain_cached_call(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle out,
                              nb::handle lse, nb::handle k, nb::handle v, nb::handle seqlens_k,
                              nb::handle page_table, nb::handle k_descale, nb::handle v_descale,
                              nb::handle cos, nb::handle sin, nb::handle q_rotated,
                              bool interleaved, const Asked& asked, int num_threads) {
    const CachedCall call(q, k_cache, v_cache, out, lse, k, v, seqlens_k, page_table, k_descale,
                          v_descale, cos, sin, q_rotated, interleaved, asked);
    return explained(call.new_keys ? &*call.new_keys : nullptr, call.params, call.device, asked,
                     num_threads);
}

nb::list kernel_list() {
    nb::list list;
    for (const KernelInfo& kernel : kernels()) {
        nb::dict entry;
        entry["name"] = kernel.name;
        entry["device"] = kernel.device == DeviceType::kCpu ? "cpu" : "cuda";
        entry["lesson"] = kernel.lesson;
        nb::list strategies;
        for (Strategy strategy : kernel.strategies) strategies.append(name_of(strategy));
        entry["strategies"] = strategies;
        list.append(entry);
    }
    return list;
}

nb::dict info() {
    const auto text_or_none = [](const std::string& text) -> nb::object {
        return text.empty() ? nb::object(nb::none()) : nb::object(nb::str(text.c_str()));
    };
    const BuildInfo build = build_info();
    nb::dict archs;
    for (const auto& kernel : build.archs) archs[kernel.kernel.c_str()] = kernel.archs;

    std::string reason;
    const int count = cuda_device_count(&reason);
    nb::list gpus;
    for (int i = 0; i < count; ++i) {
        const DeviceInfo device = device_info({DeviceType::kCuda, i});
        nb::dict gpu;
        gpu["name"] = device.name;
        gpu["arch"] = device.arch;
        gpu["sms"] = device.num_sms;
        gpu["memory_bytes"] = device.memory_bytes;
        nb::list runs;
        for (const KernelInfo& kernel : kernels()) {
            if (is_built(kernel.name, device)) runs.append(kernel.name);
        }
        gpu["kernels"] = runs;
        gpus.append(gpu);
    }

    const DeviceInfo host = device_info({DeviceType::kCpu, 0});
    nb::dict cpu;
    cpu["name"] = host.name;
    cpu["simd"] = name_of(host.simd);
    cpu["simd_built"] = build.simd;
    cpu["num_threads"] = host.num_threads;

    nb::dict result;
    result["version"] = build.version;
    result["cuda"] = text_or_none(build.cuda_version);
    result["cutlass"] = text_or_none(build.cutlass_version);
    result["archs"] = archs;
    result["gpus"] = gpus;
    result["no_gpu_because"] = text_or_none(reason);
    result["cpu"] = cpu;
    return result;
}

void set_num_threads(int n) {
    if (n < 1) {
        throw InvalidArgument("n is " + std::to_string(n) + "; it must be at least 1");
    }
    set_cpu_threads(n);
}

// ---- for frameworks that need more
// -----------------------------------------------------------------

// NumPy's bfloat16 and float8_e4m3fn (ml_dtypes) have no DLPack export, but their bits, seen as
// unsigned integers, do.
nb::object reinterpret(nb::handle bits, nb::dlpack::dtype from, nb::dlpack::dtype to) {
    const Array array(bits, "bits", Access::kWrite);
    const nb::dlpack::dltensor& t = array.tensor();
    if (t.dtype != from) {
        throw InvalidType("bits has dtype " + describe(t.dtype) + "; it must be " + describe(from));
    }
    const auto ndim = static_cast<size_t>(t.ndim);
    const auto* shape = reinterpret_cast<const size_t*>(t.shape);
    const auto [type, id] = t.device;
    if (array.read_only()) {
        return nb::cast(nb::ndarray<nb::array_api, nb::ro>(array.data(), ndim, shape, bits,
                                                           t.strides, to, type, id));
    }
    return nb::cast(
        nb::ndarray<nb::array_api>(array.data(), ndim, shape, bits, t.strides, to, type, id));
}

nb::object as_bfloat16(nb::handle bits) {
    return reinterpret(bits, nb::dtype<uint16_t>(), kBFloat16);
}
nb::object as_float8_e4m3fn(nb::handle bits) {
    return reinterpret(bits, nb::dtype<uint8_t>(), kFloat8E4M3);
}

// An uninitialised CUDA array for JAX, whose allocator cannot be reached. JAX may drop it while its
// own streams still read it, so the memory is released only once the device is idle.
nb::object cuda_empty(const std::vector<size_t>& shape, const std::string& dtype, int device) {
    static constexpr struct {
        const char* name;
        nb::dlpack::dtype dtype;
    } kDTypes[] = {{"float32", nb::dtype<float>()},
                   {"float16", {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1}},
                   {"bfloat16", kBFloat16},
                   {"uint8", nb::dtype<uint8_t>()}};
    const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                     [&](const auto& entry) { return dtype == entry.name; });
    if (known == std::end(kDTypes)) throw InvalidType("dtype is '" + dtype + "'; it is unknown");
    int64_t bytes = known->dtype.bits / 8;
    for (size_t n : shape) bytes *= static_cast<int64_t>(n);

    struct Owned {
        Device device;
        Buffer buffer;
    };
    const Device on{DeviceType::kCuda, device};
    auto owned = std::unique_ptr<Owned>(new Owned{on, {on, bytes}});
    void* data = owned->buffer.data();
    const nb::capsule owner(owned.release(), [](void* pointer) noexcept {
        const WithoutGil nogil;  // work that the device waits for may need it
        const std::unique_ptr<Owned> dropped(static_cast<Owned*>(pointer));
        try {
            synchronize(dropped->device);
        } catch (const Error&) {  // the process is ending, and the driver with it
        }
    });
    return nb::cast(nb::ndarray<nb::array_api>(data, shape.size(), shape.data(), owner, nullptr,
                                               known->dtype, nb::device::cuda::value, device));
}

void cuda_synchronize(int device) {
    const WithoutGil nogil;
    synchronize({DeviceType::kCuda, device});
}

void translate(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const InvalidType& e) {
        PyErr_SetString(PyExc_TypeError, e.what());
    } catch (const InvalidArgument& e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const Unsupported& e) {
        PyErr_SetString(PyExc_NotImplementedError, e.what());
    } catch (const Error& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
}

}  // namespace
}  // namespace fa101

// An argument of a call is taken as it is.
template <>
struct nb::detail::type_caster<fa101::Argument> {
    NB_TYPE_CASTER(fa101::Argument, const_name("object"))
    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        value = source;
        return true;
    }
};

NB_MODULE(_fa101, m) {
    using namespace fa101;
    m.doc() = "The compiled half of fa101. Call fa101.flash_attention instead.";
    m.attr("__version__") = FA101_VERSION;
    nb::register_exception_translator(translate);
    nb::set_leak_warnings(false);  // functional.py keeps Options until the process ends

    nb::class_<Explained>(m, "Plan", "How a call will run.")
        .def_prop_ro("kernel", [](const Explained& e) { return e.plan.kernel; })
        .def_prop_ro("strategy", [](const Explained& e) { return name_of(e.plan.strategy); })
        .def_prop_ro(
            "block_m", [](const Explained& e) { return e.plan.tile.block_m; },
            "Query rows of a tile.")
        .def_prop_ro(
            "block_n", [](const Explained& e) { return e.plan.tile.block_n; }, "Keys of a tile.")
        .def_prop_ro(
            "packed_heads", [](const Explained& e) { return e.plan.tile.packed_heads; },
            "Query heads that share a key/value head, whose queries are rows of one tile.")
        .def_prop_ro("num_splits", [](const Explained& e) { return e.plan.num_splits; })
        .def_prop_ro("workspace_bytes", [](const Explained& e) { return e.plan.workspace_bytes; })
        .def_prop_ro("reason", [](const Explained& e) { return e.plan.reason; })
        .def("__str__", [](const Explained& e) { return e.text; })
        // One line: explain() has printed the text where a prompt shows what it returned.
        .def("__repr__", [](const Explained& e) {
            return std::string("<fa101 Plan: ") + e.plan.kernel + ", " + name_of(e.plan.strategy) +
                   ", " + std::to_string(e.plan.num_splits) + " split(s)>";
        });

    nb::class_<Asked>(m, "Options", "What a call asks besides its arrays.")
        .def(nb::init<bool, std::optional<int64_t>, std::optional<int64_t>, const std::string&,
                      std::optional<double>, double, const std::string&, int64_t, std::string,
                      std::string>(),
             "causal"_a = false, "window_left"_a = nb::none(), "window_right"_a = nb::none(),
             "align"_a = "top_left", "softmax_scale"_a = nb::none(), "softcap"_a = 0.0,
             "layout"_a = "bhsd", "num_splits"_a = 0, "kernel"_a = "auto", "strategy"_a = "auto");

    m.def("remember", &remember, "kept"_a, "make"_a, "arguments"_a,
          "make(*arguments), or what it gave before.");

    nb::class_<TorchCalls>(m, "TorchCalls", "Calls of plain torch tensors; None for others.")
        .def(nb::init<nb::handle>(), "framework"_a)
        .def("attention", &TorchCalls::attention, "q"_a, "k"_a.none(), "v"_a.none(),
             "bias"_a.none(), "mask"_a.none(), "seqlens_k"_a.none(), "out"_a.none(), "return_lse"_a,
             "layout"_a, "options"_a)
        .def("attention_with_kvcache", &TorchCalls::attention_with_kvcache, "q"_a,
             "k_cache"_a.none(), "v_cache"_a.none(), "k"_a.none(), "v"_a.none(),
             "seqlens_k"_a.none(), "page_table"_a.none(), "k_descale"_a.none(),
             "v_descale"_a.none(), "cos"_a.none(), "sin"_a.none(), "interleaved"_a, "out"_a.none(),
             "return_lse"_a, "layout"_a, "options"_a);

    m.def("forward", &forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none(), "bias"_a.none(),
          "mask"_a.none(), "seqlens_k"_a.none(), "options"_a, "stream"_a, "allocate"_a.none(),
          "num_threads"_a,
          "Writes attention into out and, unless None, the log-sum-exp into lse. `stream` is a "
          "cudaStream_t; `allocate(n)` gives n bytes of workspace on that stream.");
    m.def("forward_with_kvcache", &forward_with_kvcache, "q"_a, "k_cache"_a, "v_cache"_a, "out"_a,
          "lse"_a.none(), "k"_a.none(), "v"_a.none(), "seqlens_k"_a.none(), "page_table"_a.none(),
          "k_descale"_a.none(), "v_descale"_a.none(), "cos"_a.none(), "sin"_a.none(),
          "q_rotated"_a.none(), "interleaved"_a, "options"_a, "stream"_a, "allocate"_a.none(),
          "num_threads"_a,
          "Writes k and v, where they are, into the caches at seqlens_k, then attention into out.");
    m.def("explain", &explain_call, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none(), "bias"_a.none(),
          "mask"_a.none(), "seqlens_k"_a.none(), "options"_a, "num_threads"_a,
          "The plan of forward() with these arguments.");
    m.def("explain_with_kvcache", &explain_cached_call, "q"_a, "k_cache"_a, "v_cache"_a, "out"_a,
          "lse"_a.none(), "k"_a.none(), "v"_a.none(), "seqlens_k"_a.none(), "page_table"_a.none(),
          "k_descale"_a.none(), "v_descale"_a.none(), "cos"_a.none(), "sin"_a.none(),
          "q_rotated"_a.none(), "interleaved"_a, "options"_a, "num_threads"_a,
          "The plan of forward_with_kvcache() with these arguments.");
    m.def("kernels", &kernel_list, "Every kernel, in the order of the ladder.");
    m.def("info", &info, "How this binary was built and what it runs on.");
    m.def("get_num_threads", &cpu_threads, "Threads that the CPU kernels use.");
    m.def("set_num_threads", &set_num_threads, "n"_a, "Sets the threads that the CPU kernels use.");
    m.def(
        "simd_level", [] { return name_of(cpu_simd_level()); },
        "The SIMD level that the CPU kernels use.");

    m.def("as_bfloat16", &as_bfloat16, "bits"_a, "The same memory, uint16 seen as bfloat16.");
    m.def("as_float8_e4m3fn", &as_float8_e4m3fn, "bits"_a,
          "The same memory, uint8 seen as float8_e4m3fn.");
    m.def("cuda_empty", &cuda_empty, "shape"_a, "dtype"_a, "device"_a,
          "An uninitialised array on a GPU.");
    m.def("cuda_synchronize", &cuda_synchronize, "device"_a,
          "Waits for everything enqueued on a GPU.");
}
